package hostile

import (
	"bytes"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// sizes are the lengths of payloads by request, 0 where none is named.
var sizes = map[vhostuser.Request]int{
	vhostuser.ReqSetFeatures: 8, vhostuser.ReqSetMemTable: 40, vhostuser.ReqSetLogBase: 16, vhostuser.ReqSetVringNum: 8,
	vhostuser.ReqSetVringAddr: 40, vhostuser.ReqSetVringBase: 8, vhostuser.ReqGetVringBase: 8, vhostuser.ReqSetVringKick: 8,
	vhostuser.ReqSetVringCall: 8, vhostuser.ReqSetVringErr: 8, vhostuser.ReqSetProtocolFeatures: 8, vhostuser.ReqSetVringEnable: 8,
	vhostuser.ReqSendRARP: 8, vhostuser.ReqNetSetMTU: 8, vhostuser.ReqIOTLBMsg: 32, vhostuser.ReqSetVringEndian: 8,
	vhostuser.ReqGetConfig: 12, vhostuser.ReqSetConfig: 12, vhostuser.ReqCreateCryptoSession: 64, vhostuser.ReqCloseCryptoSession: 8,
	vhostuser.ReqGetInflightFD: 24, vhostuser.ReqSetInflightFD: 24, vhostuser.ReqVringKick: 8, vhostuser.ReqAddMemReg: 40,
	vhostuser.ReqRemMemReg: 40, vhostuser.ReqSetStatus: 8, vhostuser.ReqGetSharedObject: 16, vhostuser.ReqSetDeviceStateFD: 8,
	vhostuser.ReqGetVringBaseSkipDrain: 8,
}

// contents are the requests whose reply carries something, so that a failure can only be told by closing.
var contents = map[vhostuser.Request]bool{
	vhostuser.ReqGetFeatures: true, vhostuser.ReqGetVringBase: true, vhostuser.ReqGetProtocolFeatures: true, vhostuser.ReqGetQueueNum: true,
	vhostuser.ReqGetConfig: true, vhostuser.ReqCreateCryptoSession: true, vhostuser.ReqPostcopyAdvise: true, vhostuser.ReqGetInflightFD: true,
	vhostuser.ReqGetMaxMemSlots: true, vhostuser.ReqGetStatus: true, vhostuser.ReqGetSharedObject: true, vhostuser.ReqGetShmemConfig: true,
	vhostuser.ReqGetVringBaseSkipDrain: true,
}

const lastRequest = vhostuser.ReqGetVringBaseSkipDrain

var framingRows = []row{
	{"A4", "descriptors_where_none_belong", func(a *attack) {
		c, fd := a.conn(), a.eventfd(0)
		for range 500 { // the size of a ring makes nothing
			must(a.t, c.SetVringNum(0, 256))
			a.refused("SET_VRING_NUM with a descriptor", c.DoAck(vhostuser.ReqSetVringNum, state(0, 128), fd))
		}
		before := a.files()
		for range 50 {
			a.refused("SET_FEATURES with 8 descriptors", c.DoAck(vhostuser.ReqSetFeatures, word(uint64(features)), fd, fd, fd, fd, fd, fd, fd, fd))
		}
		if n := a.files(); n > before {
			a.t.Errorf("%d descriptors are open, %d were", n, before)
		}
	}},
	{"A14", "short_reads_and_more_descriptors_than_regions", func(a *attack) {
		fds := make([]int, 253)
		for i := range fds {
			fds[i] = 0
		}
		a.refused("253 descriptors", a.conn().DoAck(vhostuser.ReqSetMemTable, make([]byte, 8+32*8), fds...))
	}},
	{"A15", "request_0", func(a *attack) {
		c := a.conn()
		a.refused("request 0", c.DoAck(0, nil))
		must(a.t, c.Send(0, vhostuser.FlagVersion, make([]byte, 100))) // skipped
		must(a.t, c.Sync())
	}},
	{"A16", "length_below_the_contents", func(a *attack) {
		for req, n := range sizes {
			if n < 5 {
				continue
			}
			a.rejects(req, make([]byte, 4), fmt.Sprintf("%v of 4 bytes", req))
		}
	}},
	{"A18", "inner_length_beyond_what_came", func(a *attack) {
		c := a.client(frontend.Options{})
		a.refused("8 regions in 40 bytes", c.DoAck(vhostuser.ReqSetMemTable, append(word(8), make([]byte, 32)...)))
		a.refused("SET_CONFIG of 200 bytes in 10", c.DoAck(vhostuser.ReqSetConfig, append(vhostuser.ConfigSpace{Size: 200}.Append(nil), make([]byte, 10)...)))
		b, err := c.Call(vhostuser.ReqGetConfig, append(vhostuser.ConfigSpace{Size: 200}.Append(nil), make([]byte, 10)...))
		if err != nil || len(b) != 0 {
			a.t.Errorf("GET_CONFIG of 200 bytes in 10: %d bytes, %v; want the empty reply", len(b), err)
		}
	}},
	{"A23", "malformed_messages_cost_the_connection_only", func(a *attack) {
		for _, b := range [][]byte{
			bytes.Repeat([]byte{0xff}, 64), bytes.Repeat([]byte{0}, 64), []byte("GET / HTTP/1.1\r\nHost: vhostd\r\n\r\n"),
			header(vhostuser.ReqGetVringBase, 1, 0), message(vhostuser.ReqGetVringBase, state(99, 0)),
		} {
			c := a.dial()
			must(a.t, c.SendRaw(b))
			a.closes(fmt.Sprintf("% x", b[:12]), c)
		}
		_, p := a.running(frontend.Options{})
		a.flows(p)
	}},
	{"C1", "header_cut", func(a *attack) {
		for n := 1; n < vhostuser.HeaderLen; n++ {
			c := a.dial()
			must(a.t, c.SendRaw(message(vhostuser.ReqSetOwner, nil)[:n]))
			must(a.t, c.Close())
		}
		a.timesOut("silent")
	}},
	{"C2", "payload_cut", func(a *attack) {
		whole := message(vhostuser.ReqSetVringAddr, make([]byte, 40))
		for n := vhostuser.HeaderLen; n < len(whole); n += 3 {
			c := a.dial()
			must(a.t, c.SendRaw(whole[:n]))
			must(a.t, c.CloseWrite())
			a.closes("a cut payload", c)
		}
		a.timesOut("cut")
	}},
	{"C3", "size_4_gib", func(a *attack) {
		for _, size := range []uint32{0xffffffff, 0x80000000, 1 << 20} {
			a.closesAfter(header(vhostuser.ReqSetFeatures, vhostuser.FlagVersion, size), "a payload of 4 GiB")
		}
	}},
	{"C4", "versions", func(a *attack) {
		for _, version := range []uint32{0, 2, 3} {
			a.closesAfter(header(vhostuser.ReqGetFeatures, version, 0), fmt.Sprint("version ", version))
		}
	}},
	{"C5", "reply_bit_in_a_request", func(a *attack) {
		a.closesAfter(header(vhostuser.ReqGetFeatures, vhostuser.FlagVersion|vhostuser.FlagReply, 0), "a reply")
	}},
	{"C6", "unknown_flags", func(a *attack) {
		for bit := 4; bit < 32; bit++ {
			a.closesAfter(header(vhostuser.ReqGetFeatures, vhostuser.FlagVersion|1<<bit, 0), fmt.Sprint("flag ", bit))
		}
	}},
	{"C7", "every_message_one_byte_off", func(a *attack) {
		for req := vhostuser.Request(1); req <= lastRequest; req++ {
			low, high := sizes[req]-1, sizes[req]+1
			switch req {
			case vhostuser.ReqGetConfig, vhostuser.ReqSetConfig, vhostuser.ReqCreateCryptoSession:
				high = 1 << 13 // their contents say how much there is
			case vhostuser.ReqGetInflightFD, vhostuser.ReqSetInflightFD:
				low = 19 // 20 are used
			}
			if low >= 0 {
				a.rejects(req, make([]byte, low), fmt.Sprintf("%v of %d bytes", req, low))
			}
			if high < 1<<12 {
				a.rejects(req, make([]byte, high), fmt.Sprintf("%v of %d bytes", req, high))
			}
		}
	}},
	{"C8", "every_message_with_any_number_of_descriptors", func(a *attack) {
		fd := a.eventfd(unix.EFD_NONBLOCK)
		c := a.conn()
		before := a.files()
		for req := vhostuser.Request(1); req <= lastRequest; req++ {
			for _, n := range []int{0, 1, 2, 32} {
				fds := make([]int, n)
				for i := range fds {
					fds[i] = fd
				}
				if req != vhostuser.ReqSetProtocolFeatures && !a.answeredOnce(c, req, make([]byte, sizes[req]), fds) {
					must(a.t, c.Close())
					c = a.conn()
				}
			}
		}
		a.refused("SET_PROTOCOL_FEATURES with a descriptor", c.DoAck(vhostuser.ReqSetProtocolFeatures, word(uint64(vhostuser.ProtoReplyAck)), fd))
		if n := a.files(); n > before+8 { // ring 0 keeps some of them, the log and the channel too
			a.t.Errorf("%d descriptors are open, %d were", n, before)
		}
	}},
	{"C9", "more_descriptors_than_one_send_holds", func(a *attack) {
		fds := make([]int, 253)
		c := a.dial()
		for _, b := range message(vhostuser.ReqSetOwner, nil)[:2] {
			if err := c.SendRaw([]byte{b}, fds...); err != nil {
				a.t.Logf("the second send: %v", err)
			}
		}
		a.closes("506 descriptors", c)
	}},
	{"C10", "coalesced_and_split_messages", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for p.TX.WaitCall(20*time.Millisecond) == nil { // until only a new descriptor brings a call
		}
		m := message(vhostuser.ReqSetVringCall, word(1))
		must(a.t, c.SendRaw(append(message(vhostuser.ReqSetOwner, nil), m[0]), nil...))
		must(a.t, c.SendRaw(m[1:2], p.TX.CallFD)) // with the second byte
		for _, b := range m[2:] {
			must(a.t, c.SendRaw([]byte{b}))
		}
		if err := p.TX.WaitCall(patience); err != nil {
			a.t.Errorf("the call descriptor got lost: %v", err)
		}
		must(a.t, c.SendRaw(bytes.Repeat(message(vhostuser.ReqGetFeatures, nil), 20)))
		for range 20 {
			if r, err := c.Recv(patience); err != nil || r.Request != vhostuser.ReqGetFeatures {
				a.t.Fatalf("reply to one of 20 in one send: %+v, %v", r, err)
			}
		}
		a.flows(p)
	}},
	{"C11", "unknown_requests", func(a *attack) {
		c := a.conn()
		for _, req := range []vhostuser.Request{46, 47, 0x7fffffff, 0xffffffff} {
			a.refused(fmt.Sprint("request ", uint32(req)), c.DoAck(req, make([]byte, 8)))
			must(a.t, c.Send(req, vhostuser.FlagVersion, make([]byte, 8), 0))
			must(a.t, c.Sync())
		}
	}},
	{"C12", "need_reply_without_reply_ack", func(a *attack) {
		c := a.dial()
		must(a.t, c.Send(vhostuser.ReqSetOwner, vhostuser.FlagVersion|vhostuser.FlagNeedReply, nil))
		must(a.t, c.Send(vhostuser.ReqSetVringNum, vhostuser.FlagVersion|vhostuser.FlagNeedReply, state(0, 3)))
		must(a.t, c.Sync()) // its reply is the first
	}},
	{"C13", "peer_closes_before_the_reply", func(a *attack) {
		for range 100 {
			c, err := frontend.Dial(filepath.Join(a.dir, "evil"))
			must(a.t, err)
			_ = c.SendRaw(bytes.Repeat(message(vhostuser.ReqGetFeatures, nil), 20)) // another one may still be connected
			must(a.t, c.Close())
		}
		must(a.t, a.dial().Sync())
	}},
	{"C14", "replies_that_nobody_reads", func(a *attack) { a.timesOut("deaf") }},
	{"C15", "256_connections", func(a *attack) {
		_, p := a.running(frontend.Options{})
		var crowd [256]*frontend.Conn
		for i := range crowd {
			eventually(a.t, "the socket takes one more", func() (ok bool) {
				var err error
				crowd[i], err = frontend.Dial(filepath.Join(a.dir, "evil"))
				return err == nil
			})
		}
		for _, c := range crowd {
			if err := c.AwaitClose(patience); err != nil {
				a.t.Errorf("one of 256: %v", err)
			}
			must(a.t, c.Close())
		}
		a.flows(p)
	}},
}

func header(req vhostuser.Request, flags, size uint32) []byte {
	return vhostuser.Header{Request: req, Flags: flags, Size: size}.Append(nil)
}

// closesAfter demands that these bytes end a connection.
func (a *attack) closesAfter(b []byte, what string) {
	a.t.Helper()
	c := a.dial()
	must(a.t, c.SendRaw(b))
	a.closes(what, c)
}

// rejects demands that a message is refused, or ends its connection if its reply must carry something.
func (a *attack) rejects(req vhostuser.Request, payload []byte, what string) {
	a.t.Helper()
	c := a.conn()
	defer c.Close()
	err := c.DoAck(req, payload)
	if !isRefused(err) && !(contents[req] && isClosed(err)) {
		a.t.Errorf("%s: %v, want a refusal or, of a request with a reply, the end", what, err)
	}
}

// answeredOnce sends a message and demands exactly one reply. It returns false if the connection has ended, as it may if the reply must
// carry something.
func (a *attack) answeredOnce(c *frontend.Conn, req vhostuser.Request, payload []byte, fds []int) (alive bool) {
	a.t.Helper()
	must(a.t, c.Send(req, vhostuser.FlagVersion|vhostuser.FlagNeedReply, payload, fds...))
	r, err := c.Recv(patience)
	for _, fd := range r.FDs {
		unix.Close(fd)
	}
	if isClosed(err) && contents[req] {
		return false
	}
	if err != nil || r.Request != req || r.Flags != vhostuser.FlagVersion|vhostuser.FlagReply {
		a.t.Fatalf("%v with %d descriptors: reply %+v, %v", req, len(fds), r.Header, err)
	}
	if err := c.Sync(); err != nil {
		a.t.Fatalf("%v with %d descriptors: %v behind its reply", req, len(fds), err)
	}
	return true
}

// timesOut demands that the program has ended, or soon ends, the connection of a front-end that does not go on.
func (a *attack) timesOut(name string) {
	a.t.Helper()
	end := time.Now().Add(2 * patience)
	for a.status(name).Connected {
		if time.Now().After(end) {
			a.t.Fatalf("%s is still connected", name)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if len(a.slow) == 0 {
		a.t.Fatal("nobody was slow")
	}
}
