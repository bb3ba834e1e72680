package vhostuser_test

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

// replay plays the front-end of one transcript.
type replay struct {
	*bench
	t       *testing.T
	dev     *fakeDevice
	strict  bool // send messages of features that are not offered, too
	files   map[guestmem.RegionSpec]int
	regions []guestmem.RegionSpec
	kicks   map[int]int
	kicked  map[int]bool

	offered  virtio.Features
	protocol vhostuser.ProtocolFeatures
	cut      bool // the session rightly ended the connection
}

// TestReplay sends what real front-ends sent. Masked, they see what this back-end
// offers and leave out what it does not: then everything must succeed and every
// ring must run. As recorded, messages that are not offered get the answers that
// the protocol asks for.
func TestReplay(t *testing.T) {
	paths, err := filepath.Glob("testdata/traces/*.txt")
	if err != nil || len(paths) != 21 {
		t.Fatalf("%d transcripts, %v", len(paths), err)
	}
	for _, path := range paths {
		events, err := readTranscript(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, mode := range []string{"masked", "recorded"} {
			t.Run(filepath.Base(path)+"/"+mode, func(t *testing.T) {
				newReplay(t, mode == "recorded").run(events)
			})
		}
	}
}

func newReplay(t *testing.T, strict bool) *replay {
	dev := newDevice(4)
	dev.features |= virtio.FRingPacked | virtio.FNetMTU | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN |
		virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN
	r := &replay{t: t, dev: dev, strict: strict, files: map[guestmem.RegionSpec]int{}, kicks: map[int]int{}}
	t.Cleanup(func() {
		for _, fd := range r.files {
			unix.Close(fd)
		}
	})
	return r
}

func (r *replay) run(events []event) {
	for _, ev := range events {
		switch ev.kind {
		case evAccept:
			r.bench = newBench(r.t, r.dev)
			r.kicked, r.regions, r.cut = map[int]bool{}, nil, false
		case evClose:
			r.end(ev.line)
		case evGuestKick:
			if fd, ok := r.kicks[ev.ring]; ok {
				_, _ = unix.Write(fd, payload64(1))
			}
		case evMessage:
			if !r.cut {
				r.message(ev)
			}
		}
	}
	if !r.ended {
		r.end(0)
	}
}

func (r *replay) end(line int) {
	r.t.Helper()
	r.Conn.Close()
	if err := r.wait(); err != nil && !r.cut {
		r.t.Errorf("line %d: Serve returned %v", line, err)
	}
	r.checkDevice()
	if !r.strict && r.logs.lines() != 0 {
		r.t.Errorf("logged %s", r.logs)
	}
}

func (r *replay) message(ev event) {
	r.t.Helper()
	if !r.mask(&ev) {
		return
	}
	r.must(r.Send(ev.req, ev.flags, ev.payload, r.descriptors(ev)...))
	r.expect(ev)
	if !r.cut {
		r.must(r.Sync()) // any reply too many comes before this one's
		r.follow(ev)
	}
}

// mask turns what was recorded into what the front-end sends to a back-end that
// offers less. It reports false for a message that it would not send.
func (r *replay) mask(ev *event) bool {
	switch ev.req {
	case vhostuser.ReqSetFeatures:
		f := virtio.Features(binary.LittleEndian.Uint64(ev.payload))
		ev.payload = payload64(uint64(f & r.offered))
	case vhostuser.ReqSetProtocolFeatures:
		r.protocol &= vhostuser.ProtocolFeatures(binary.LittleEndian.Uint64(ev.payload))
		ev.payload = payload64(uint64(r.protocol))
	case vhostuser.ReqSetVringAddr:
		r.maskAddr(ev)
	case vhostuser.ReqSetMemTable:
		if len(ev.regions) == 0 {
			return r.strict // the acknowledgement of postcopy
		}
		r.regions = ev.regions
	case vhostuser.ReqSetBackendReqFD, vhostuser.ReqIOTLBMsg,
		vhostuser.ReqPostcopyAdvise, vhostuser.ReqPostcopyListen, vhostuser.ReqPostcopyEnd:
		return r.strict
	}
	return true
}

// maskAddr takes a front-end address in the first region where an IOVA was recorded.
func (r *replay) maskAddr(ev *event) {
	if len(r.regions) == 0 {
		return
	}
	r0 := r.regions[0]
	for off := 8; off < 32; off += 8 {
		if a := binary.LittleEndian.Uint64(ev.payload[off:]); a < 1<<32 {
			binary.LittleEndian.PutUint64(ev.payload[off:], r0.UVA+a&0xfffffff)
		}
	}
}

func (r *replay) descriptors(ev event) (fds []int) {
	for i := range ev.fds {
		if len(ev.regions) != 0 {
			fds = append(fds, r.file(ev.regions[i]))
			continue
		}
		if ev.req == vhostuser.ReqSetLogBase {
			fds = append(fds, r.file(guestmem.RegionSpec{Size: binary.LittleEndian.Uint64(ev.payload)}))
			continue
		}
		fd := eventFD(r.t)
		if ev.req == vhostuser.ReqSetVringKick {
			r.kicks[int(ev.payload[0])] = fd
		}
		fds = append(fds, fd)
	}
	return fds
}

func (r *replay) file(spec guestmem.RegionSpec) int {
	if fd, ok := r.files[spec]; ok {
		return fd
	}
	fd, err := unix.MemfdCreate("vhost-user-replay", unix.MFD_CLOEXEC)
	r.must(err)
	r.must(unix.Ftruncate(fd, int64(spec.MmapOffset+spec.Size)))
	r.files[spec] = fd
	return fd
}

// expect checks the reply, or that a connection ends which cannot have one.
func (r *replay) expect(ev event) {
	r.t.Helper()
	kind := answers[ev.req]
	unserved := slices.Contains([]vhostuser.Request{
		vhostuser.ReqPostcopyAdvise,
		vhostuser.ReqSetBackendReqFD, vhostuser.ReqIOTLBMsg, vhostuser.ReqPostcopyListen, vhostuser.ReqPostcopyEnd,
	}, ev.req)
	if unserved && kind == contents {
		r.must(r.AwaitClose(time.Second))
		r.cut = true
		return
	}
	need := ev.flags&vhostuser.FlagNeedReply != 0 && r.protocol&vhostuser.ProtoReplyAck != 0
	if kind == ackIfAsked && !need {
		return
	}
	reply, err := r.Recv(time.Second)
	r.must(err)
	if ev.req == vhostuser.ReqSetLogBase {
		if reply.Flags != 5 || !bytes.Equal(reply.Payload, ev.payload) {
			r.t.Fatalf("line %d: reply %+v to %v", ev.line, reply, ev.req)
		}
		return
	}
	if reply.Request != ev.req || reply.Flags != 5 || len(reply.Payload) != 8 {
		r.t.Fatalf("line %d: reply %+v to %v", ev.line, reply, ev.req)
	}
	v, _ := reply.U64()
	switch {
	case kind == contents:
		r.learn(ev.req, v)
	case unserved != (v != 0):
		r.t.Errorf("line %d: %v answered %#x", ev.line, ev.req, v)
	}
}

func (r *replay) learn(req vhostuser.Request, v uint64) {
	switch req {
	case vhostuser.ReqGetFeatures:
		r.offered = virtio.Features(v)
	case vhostuser.ReqGetProtocolFeatures:
		r.protocol = vhostuser.ProtocolFeatures(v)
	}
}

// follow checks what the device was told.
func (r *replay) follow(ev event) {
	r.t.Helper()
	if len(ev.payload) == 0 {
		return
	}
	ring := int(ev.payload[0])
	switch ev.req {
	case vhostuser.ReqSetVringKick:
		r.kicked[ring] = true
	case vhostuser.ReqGetVringBase:
		r.kicked[ring] = false
	case vhostuser.ReqSetVringEnable:
		r.dev.peek(func(d *fakeDevice) {
			if d.enabled[ring] != (ev.payload[4] == 1) {
				r.t.Errorf("line %d: ring %d enabled %v", ev.line, ring, d.enabled[ring])
			}
		})
	default:
		return
	}
	if r.strict {
		return // what is not served may have been needed
	}
	r.dev.peek(func(d *fakeDevice) {
		for i, want := range r.kicked {
			if _, got := d.running[i]; got != want {
				r.t.Errorf("line %d: ring %d running %v, want %v", ev.line, i, got, want)
			}
		}
	})
}
