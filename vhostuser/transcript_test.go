package vhostuser_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
)

// The transcripts in testdata/traces were recorded between a real front-end and a
// recorder that offered every feature. One line is one event: time, name, fields.

// event is one line of a transcript.
type event struct {
	line    int
	kind    eventKind
	req     vhostuser.Request
	flags   uint32
	payload []byte
	fds     int
	regions []guestmem.RegionSpec // of SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG
	ring    int                   // of a guest's kick
}

type eventKind uint8

const (
	evMessage eventKind = iota
	evAccept
	evClose
	evGuestKick
)

var (
	fieldPattern  = regexp.MustCompile(`(\w+)=(\w+)`)
	regionPattern = regexp.MustCompile(`\[[^\]]*\]`)
	requestByName = func() map[string]vhostuser.Request {
		m := map[string]vhostuser.Request{}
		for id := vhostuser.Request(1); id <= 45; id++ {
			m[id.String()] = id
		}
		return m
	}()
)

func readTranscript(path string) ([]event, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var events []event
	scanner := bufio.NewScanner(f)
	for n := 1; scanner.Scan(); n++ {
		words := strings.Fields(scanner.Text())
		if len(words) < 2 {
			continue
		}
		ev, err := parseEvent(words[1], strings.Join(words[2:], " "))
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
		ev.line = n
		events = append(events, ev)
	}
	return events, scanner.Err()
}

func parseEvent(name, rest string) (event, error) {
	switch name {
	case "ACCEPT":
		return event{kind: evAccept}, nil
	case "EOF", "**":
		return event{kind: evClose}, nil
	case "KICK":
		var ring int
		_, err := fmt.Sscanf(rest, "q%d", &ring)
		return event{kind: evGuestKick, ring: ring}, err
	}
	req, ok := requestByName[name]
	if !ok {
		return event{}, fmt.Errorf("unknown event %q", name)
	}
	fields := parseFields(rest)
	ev := event{req: req, flags: uint32(fields["flags"]), fds: int(fields["fds"])}
	switch req {
	case vhostuser.ReqSetMemTable:
		for _, r := range regionPattern.FindAllString(rest, -1) {
			ev.regions = append(ev.regions, regionOf(parseFields(r)))
		}
	case vhostuser.ReqAddMemReg, vhostuser.ReqRemMemReg:
		ev.regions = append(ev.regions, regionOf(fields))
	}
	ev.payload = ev.encode(fields)
	if len(ev.payload) != int(fields["size"]) {
		return event{}, fmt.Errorf("%s: %d bytes encoded, %d recorded", name, len(ev.payload), fields["size"])
	}
	return ev, nil
}

// encode rebuilds the payload.
func (ev *event) encode(f map[string]uint64) []byte {
	switch ev.req {
	case vhostuser.ReqSetMemTable:
		return vhostuser.AppendMemTable(nil, ev.regions)
	case vhostuser.ReqAddMemReg, vhostuser.ReqRemMemReg:
		return vhostuser.AppendMemTable(nil, ev.regions)[:40]
	case vhostuser.ReqSetVringAddr:
		return vhostuser.VringAddr{
			Index: uint32(f["idx"]), Flags: uint32(f["flags2"]),
			Desc: f["desc"], Used: f["used"], Avail: f["avail"], Log: f["log"],
		}.Append(nil)
	case vhostuser.ReqSetVringNum, vhostuser.ReqSetVringBase, vhostuser.ReqGetVringBase, vhostuser.ReqSetVringEnable:
		return vhostuser.VringState{Index: uint32(f["idx"]), Num: uint32(f["num"])}.Append(nil)
	case vhostuser.ReqSetLogBase:
		b := binary.LittleEndian.AppendUint64(nil, 16384)
		return binary.LittleEndian.AppendUint64(b, 0)
	case vhostuser.ReqIOTLBMsg:
		var b []byte
		for _, v := range []uint64{f["iova"], f["size2"], f["uaddr"], f["perm"] | f["type"]<<8} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		return b
	}
	if v, ok := f["u64"]; ok {
		return binary.LittleEndian.AppendUint64(nil, v)
	}
	return nil
}

// parseFields reads name=number pairs; a name that occurs again becomes name2.
func parseFields(s string) map[string]uint64 {
	fields := map[string]uint64{}
	for _, m := range fieldPattern.FindAllStringSubmatch(s, -1) {
		v, err := strconv.ParseUint(m[2], 0, 64)
		if err != nil {
			continue
		}
		if _, ok := fields[m[1]]; ok {
			m[1] += "2"
		}
		fields[m[1]] = v
	}
	return fields
}

func regionOf(f map[string]uint64) guestmem.RegionSpec {
	size := f["size"]
	if second, ok := f["size2"]; ok {
		size = second // the message's size came first
	}
	return guestmem.RegionSpec{GPA: f["gpa"], Size: size, UVA: f["uva"], MmapOffset: f["off"]}
}
