package vhostuser_test

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// A fuzz input is a list of messages: id, control, length, payload. Control bits:
// 0-1 number of descriptors, 2-3 which to begin with, 4 need_reply, 5 set: the
// payload is sent without any header, as broken framing.
const (
	fuzzFDs   = 0x03
	fuzzKind  = 0x0c
	fuzzNeed  = 0x10
	fuzzBroke = 0x20
)

// fuzzMessage encodes one message of a fuzz input; payloads have even lengths.
func fuzzMessage(id vhostuser.Request, control byte, payload []byte) []byte {
	return append([]byte{byte(id), control, byte(len(payload) / 2)}, payload...)
}

func fuzzSeed(mem *frontend.Memory, protocol uint64, features virtio.Features) []byte {
	const eventfd, memfd = 1, 1 | 1<<2
	specs, _ := mem.Table()
	seed := fuzzMessage(vhostuser.ReqSetProtocolFeatures, 0, payload64(protocol))
	seed = append(seed, fuzzMessage(vhostuser.ReqSetVringEnable, fuzzNeed, vhostuser.VringState{Num: 1}.Append(nil))...)
	seed = append(seed, fuzzMessage(vhostuser.ReqSetFeatures, fuzzNeed, payload64(uint64(features|bit30)))...)
	seed = append(seed, fuzzMessage(vhostuser.ReqSetMemTable, memfd|fuzzNeed, vhostuser.AppendMemTable(nil, specs))...)
	for i := range uint32(2) {
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringNum, 0, vhostuser.VringState{Index: i, Num: 256}.Append(nil))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringBase, 0, vhostuser.VringState{Index: i, Num: 7}.Append(nil))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringAddr, 0, ringAddr(mem, int(i)).Append(nil))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringKick, eventfd, payload64(uint64(i)))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringCall, eventfd|fuzzNeed, payload64(uint64(i)))...)
	}
	seed = append(seed, fuzzMessage(vhostuser.ReqSetMemTable, memfd|fuzzNeed, vhostuser.AppendMemTable(nil, specs))...)
	seed = append(seed, fuzzMessage(vhostuser.ReqRemMemReg, memfd|fuzzNeed, vhostuser.AppendMemReg(nil, specs[0]))...)
	for range 2 {
		seed = append(seed, fuzzMessage(vhostuser.ReqAddMemReg, memfd|fuzzNeed, vhostuser.AppendMemReg(nil, specs[0]))...)
	}
	seed = append(seed, fuzzMessage(vhostuser.ReqSetBackendReqFD, 1|3<<2, nil)...)
	for _, msg := range []vhostuser.IOTLBMsg{
		{IOVA: specs[0].UVA, Size: specs[0].Size, UVA: specs[0].UVA, Perm: 3, Type: vhostuser.IOTLBUpdate},
		{IOVA: specs[0].UVA, Size: 0x1000, Type: vhostuser.IOTLBInvalidate}, {Size: 1<<64 - 1, Type: vhostuser.IOTLBInvalidate},
	} {
		seed = append(seed, fuzzMessage(vhostuser.ReqIOTLBMsg, 0, msg.Append(nil))...)
	}
	seed = append(seed, fuzzMessage(vhostuser.ReqSetVringEndian, 0, vhostuser.VringState{Index: 1}.Append(nil))...)
	seed = append(seed, fuzzMessage(vhostuser.ReqSetLogFD, eventfd, nil)...)
	seed = append(seed, fuzzMessage(vhostuser.ReqSetLogBase, memfd, vhostuser.DirtyLog{Size: 64, Offset: 9}.Append(nil))...)
	seed = append(seed, fuzzMessage(vhostuser.ReqSetFeatures, fuzzNeed, payload64(uint64(logged)))...)
	for i := range 2 {
		a := ringAddr(mem, i)
		a.Flags, a.Log = 1, 0x5000
		seed = append(seed, fuzzMessage(vhostuser.ReqSetVringAddr, fuzzNeed, a.Append(nil))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqSetLogBase, memfd, vhostuser.DirtyLog{Size: 8}.Append(nil))...)
		seed = append(seed, fuzzMessage(vhostuser.ReqGetVringBase, 0, vhostuser.VringState{Index: uint32(i)}.Append(nil))...)
	}
	seed = append(seed, fuzzMessage(vhostuser.ReqSetDeviceStateFD, 1|2<<2, vhostuser.VringState{Index: vhostuser.StateLoad}.Append(nil))...)
	return append(seed, fuzzMessage(vhostuser.ReqCheckDeviceState, 0, nil)...)
}

// FuzzMessages: whatever a front-end sends, with whatever descriptors, the session
// ends cleanly, keeps the device's contract and leaves nothing open.
func FuzzMessages(f *testing.F) {
	mem := newMemory(f, 1<<20)
	f.Add(fuzzSeed(mem, 0x9801f, testFeatures))
	f.Add(fuzzSeed(mem, 0x9803f, testFeatures|virtio.FAccessPlatform))
	f.Add(fuzzMessage(vhostuser.ReqGetFeatures, fuzzBroke, header(vhostuser.ReqSetMemTable, 1, 0xffffffff)))
	f.Add(fuzzMessage(vhostuser.ReqSetVringKick, 3, payload64(1<<40)))
	f.Add(fuzzMessage(vhostuser.ReqGetConfig, fuzzNeed, vhostuser.ConfigSpace{Offset: 1 << 31, Size: 2}.Append(nil)))

	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		f.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	sockets, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		f.Fatal(err)
	}
	defer unix.Close(sockets[0])
	defer unix.Close(sockets[1])
	kinds := []int{eventFD(f), mem.Regions[0].FD, pipe[0], sockets[0]}

	f.Fuzz(func(t *testing.T, input []byte) {
		fds, maps := openFDs(), mappings(t)
		fuzzSession(t, input, kinds)
		if n, m := openFDs(), mappings(t); n > fds || m > maps {
			t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
		}
	})
}

func fuzzSession(t *testing.T, input []byte, kinds []int) {
	front, back := socketPair(t)
	dev := newDevice(2)
	dev.config = make([]byte, 24)
	dev.features |= virtio.FAccessPlatform
	ended := make(chan error, 1)
	go func() {
		ended <- vhostuser.Serve(context.Background(), back, dev, vhostuser.Options{MessageTimeout: time.Second, StateTimeout: 20 * time.Millisecond, Protocol: vhostuser.ProtoGPAAddresses})
	}()
	drained := make(chan struct{})
	go func() { // replies must never block the session
		defer close(drained)
		b := make([]byte, 4096)
		for {
			if _, err := front.Read(b); err != nil {
				return
			}
		}
	}()
	conn := frontend.NewConn(front)
	for len(input) >= 3 && fuzzSend(conn, &input, kinds) == nil {
	}
	_ = conn.CloseWrite()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("Serve did not return")
	}
	<-drained
	_ = conn.Close()
	if fault := dev.faults.Load(); fault != nil {
		t.Fatal(*fault)
	}
}

func fuzzSend(conn *frontend.Conn, input *[]byte, kinds []int) error {
	id, control, n := (*input)[0], (*input)[1], 2*int((*input)[2])
	*input = (*input)[3:]
	payload := (*input)[:min(n, len(*input))]
	*input = (*input)[len(payload):]
	var fds []int
	for i := range int(control & fuzzFDs) {
		fds = append(fds, kinds[(int(control&fuzzKind)>>2+i)%len(kinds)])
	}
	if control&fuzzBroke != 0 {
		if len(payload) == 0 {
			return nil
		}
		return conn.SendRaw(payload, fds...)
	}
	flags := uint32(vhostuser.FlagVersion)
	if control&fuzzNeed != 0 {
		flags |= vhostuser.FlagNeedReply
	}
	return conn.Send(vhostuser.Request(id), flags, payload, fds...)
}
