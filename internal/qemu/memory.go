package qemu

import (
	"fmt"
	"slices"
	"strings"
)

// backendPrefix starts the types of memory objects.
const backendPrefix = "memory-backend-"

// shared says whether the memory of a memory object can be mapped by a back-end. The kinds differ in their default; anonymous memory
// has no file that could be passed on.
func (o option) shared() bool {
	if o.values["qom-type"] == backendPrefix+"ram" {
		return false
	}
	switch o.values["share"] {
	case "on", "yes", "y", "true":
		return true
	case "":
		return o.values["qom-type"] == backendPrefix+"memfd"
	}
	return false
}

// memory returns the options that are missing for memory that a back-end can map.
func (c *Command) memory() ([]string, error) {
	if o := c.all("mem-path"); len(o) > 0 {
		return nil, fmt.Errorf("%v: this memory is not shared with the back-end: write "+
			"-object memory-backend-file,id=mem0,size=SIZE,mem-path=%s,share=on -machine memory-backend=mem0", o[0], o[0].text)
	}
	free, err := c.memoryObjects()
	if err != nil {
		return nil, err
	}
	nodes := false
	for _, o := range c.all("numa") {
		if o.values["mem"] != "" {
			return nil, fmt.Errorf("%v: this memory is not shared with the back-end: write "+
				"-object memory-backend-memfd,id=ID,size=%s,share=on -numa node,memdev=ID", o, o.values["mem"])
		}
		nodes = nodes || o.values["memdev"] != ""
	}
	switch {
	case nodes || c.last("machine", "memory-backend") != "":
		return nil, nil
	case len(free) == 1:
		return []string{"-machine", "memory-backend=" + escape(free[0])}, nil
	case len(free) > 1:
		return nil, fmt.Errorf("-object: which of %s is the guest's memory? Say -machine memory-backend=ID", strings.Join(free, " and "))
	}
	options, err := Memory(c.last("m", "size"))
	if err != nil {
		return nil, fmt.Errorf("-m: %w", err)
	}
	return options, nil
}

// memoryObjects judges the memory objects and returns the ids of those that no device has.
func (c *Command) memoryObjects() (free []string, err error) {
	for _, o := range c.all("object") {
		kind := o.values["qom-type"]
		if !strings.HasPrefix(kind, backendPrefix) {
			continue
		}
		if !o.shared() {
			if kind == backendPrefix+"ram" {
				return nil, fmt.Errorf("%v: this memory cannot be shared with the back-end: write %smemfd and share=on", o, backendPrefix)
			}
			return nil, fmt.Errorf("%v: this memory is not shared with the back-end: add share=on", o)
		}
		id := o.values["id"]
		if !slices.ContainsFunc(c.all("device"), func(d option) bool { return d.values["memdev"] == id }) {
			free = append(free, id)
		}
	}
	return free, nil
}
