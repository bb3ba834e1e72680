package qemu

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Command is a QEMU command line that was read. It does not change.
type Command struct {
	words   []string
	options []option
}

// option is an option that this package knows, with its value taken apart.
type option struct {
	name, text string
	values     map[string]string
}

// String is the option as it was written.
func (o option) String() string { return strings.TrimSpace("-" + o.name + " " + o.text) }

// implied is the key of a value that has none, for each option of interest that takes a value.
var implied = map[string]string{
	"m": "size", "object": "qom-type", "numa": "type", "machine": "type", "mem-path": "path", "chardev": "backend", "netdev": "type",
	"device": "driver", "smp": "cpus", "accel": "accel",
}

// Read takes a command line apart: the program and its arguments.
func Read(words []string) (*Command, error) {
	c := &Command{words: words}
	for i := 1; i < len(words); i++ {
		name, ok := strings.CutPrefix(words[i], "-")
		if name = strings.TrimPrefix(name, "-"); !ok {
			continue
		}
		if name == "M" {
			name = "machine"
		}
		key, takes := implied[name]
		switch {
		case !takes:
			c.options = append(c.options, option{name: name})
		case i+1 == len(words):
			return nil, fmt.Errorf("%s: its value is missing", words[i])
		default:
			i++
			o := option{name: name, text: words[i]}
			var err error
			if o.values, err = parseValue(o.text, key); err != nil {
				return nil, fmt.Errorf("%v: %w", o, err)
			}
			c.options = append(c.options, o)
		}
	}
	return c, nil
}

// parseValue reads [VALUE,]key=value,… in which a comma is doubled, or an object of JSON.
func parseValue(text, implied string) (map[string]string, error) {
	values := map[string]string{}
	if strings.HasPrefix(text, "{") {
		var object map[string]any
		if err := json.Unmarshal([]byte(text), &object); err != nil {
			return nil, fmt.Errorf("is no JSON: %w", err)
		}
		for key, v := range object {
			values[key] = fmt.Sprint(v)
		}
		return values, nil
	}
	const comma = "\x00" // no argument of a program can hold it
	for i, part := range strings.Split(strings.ReplaceAll(text, ",,", comma), ",") {
		key, value, ok := strings.Cut(strings.ReplaceAll(part, comma, ","), "=")
		if !ok && i == 0 {
			key, value = implied, key
		} else if !ok {
			value = "on" // the short form of a switch
		}
		values[key] = value
	}
	return values, nil
}

// all are the options of one name.
func (c *Command) all(name string) (list []option) {
	for _, o := range c.options {
		if o.name == name {
			list = append(list, o)
		}
	}
	return list
}

// last is the value that the last option of a name gives to a key: QEMU merges options that may be given again.
func (c *Command) last(name, key string) (value string) {
	for _, o := range c.all(name) {
		if v, ok := o.values[key]; ok {
			value = v
		}
	}
	return value
}

// With returns the command line with the guest's memory shared and the device connected. A -device of the command line with
// netdev=vhostd0 takes the place of ours. The error names the option that cannot stay, and what to write instead.
func (c *Command) With(d Device) ([]string, error) {
	if len(c.all("daemonize")) > 0 {
		return nil, fmt.Errorf("-daemonize: QEMU must stay in the foreground: leave it out, or start vhostd serve, and QEMU with the options of " +
			"vhostd qemu-args")
	}
	for _, name := range []string{"chardev", "netdev", "object"} {
		for _, o := range c.all(name) {
			if id := o.values["id"]; id == ID || id == MemoryID {
				return nil, fmt.Errorf("%v: vhostd uses the id %s itself: choose another one", o, id)
			}
		}
	}
	memory, err := c.memory()
	if err != nil {
		return nil, err
	}
	words := append(slices.Clone(c.words), memory...)
	if slices.ContainsFunc(c.all("device"), func(o option) bool { return o.values["netdev"] == ID }) {
		return append(words, d.netdev()...), nil
	}
	return append(words, d.Args()...), nil
}

// Emulated says whether the processor may be emulated (TCG), which is what QEMU does unless it is told otherwise.
func (c *Command) Emulated() bool {
	var list []string
	for _, o := range c.all("accel") {
		list = append(list, o.values["accel"])
	}
	if text := c.last("machine", "accel"); text != "" {
		list = append(list, strings.Split(text, ":")...)
	}
	if len(c.all("enable-kvm")) > 0 {
		list = append(list, "kvm")
	}
	return slices.Contains(list, "tcg") || len(list) == 0
}

// CPUs is the number of processors of the guest at its start.
func (c *Command) CPUs() int {
	if n, err := strconv.Atoi(c.last("smp", "cpus")); err == nil {
		return max(n, 1)
	}
	product := 1
	for _, key := range []string{"drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"} {
		if n, err := strconv.Atoi(c.last("smp", key)); err == nil {
			product *= max(n, 1)
		}
	}
	return product
}
