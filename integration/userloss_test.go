package integration

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// testUserLoss moves streams in both directions at once while one frame of a hundred is lost on either way and the receivers rest until
// every window is closed (NAT-19). All bytes arrive, and no stream stands still.
func testUserLoss(t *testing.T, e *userEnv) {
	flows, n := rounds(2, 8), int64(rounds(2, 200))*1_000_000
	rests := guest.Rests{Every: 20_000_000, For: 10 * time.Second}
	// Five seconds, three times that for an emulated guest; the short form has a machine that may be busy with other things.
	longestStall := time.Duration(rounds(60, 15)) * time.Second
	// Smaller frames, of which more are lost.
	e.call(t, guest.CommandOffloads, guest.OffloadsArgs{Name: "eth0", On: false}, nil)
	e.call(t, guest.CommandLoss, guest.LossArgs{Name: "eth0", Percent: 1}, nil)
	before, err := e.vm.Link(guest.LinkArgs{Name: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	var all sync.WaitGroup
	for i := range flows {
		host, toGuest := []string{rig.Live4, rig.Live6}[i/2%2], i%2 == 0
		all.Go(func() {
			result, err := e.restingStream(host, n, uint64(i), toGuest, rests)
			name := fmt.Sprintf("stream %d, %s, to the guest %v", i, host, toGuest)
			switch {
			case err != nil:
				t.Errorf("%s: %v", name, err)
			case result.Longest > longestStall:
				t.Errorf("%s: stood still for %v", name, result.Longest)
			}
			t.Logf("%s: %d bytes in %v, digests equal, at most %v without any", name, result.Bytes, result.Took.Round(time.Millisecond),
				result.Longest.Round(time.Millisecond))
		})
	}
	all.Wait()
	after, err := e.vm.Link(guest.LinkArgs{Name: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d streams of %d bytes in %v; the guest's card sent %d frames and received %d", flows, n, time.Since(start).Round(time.Second),
		after.Counters["tx_packets"]-before.Counters["tx_packets"], after.Counters["rx_packets"]-before.Counters["rx_packets"])
	e.call(t, guest.CommandLoss, guest.LossArgs{Name: "eth0"}, nil)
	e.call(t, guest.CommandOffloads, guest.OffloadsArgs{Name: "eth0", On: true}, nil)
	e.download(t, "http://"+rig.Live4, mebibyte)
}

// restingStream moves n bytes from one end to the other, where they are received with rests, and compares the digests.
func (e *userEnv) restingStream(host string, n int64, seed uint64, toGuest bool, rests guest.Rests) (guest.StreamResult, error) {
	listener, err := e.Listen(net.JoinHostPort(host, "0"))
	if err != nil {
		return guest.StreamResult{}, err
	}
	defer listener.Close()
	type end struct {
		guest.StreamResult
		err error
	}
	onHost := make(chan end, 1)
	go func() {
		var h end
		defer func() { onHost <- h }()
		conn, err := listener.Accept()
		if h.err = err; err != nil {
			return
		}
		defer conn.Close()
		if h.err = conn.SetDeadline(time.Now().Add(patience)); h.err != nil {
			return
		}
		if toGuest {
			h.StreamResult, h.err = guest.SendStream(conn, n, seed)
		} else {
			h.StreamResult, h.err = guest.ReceiveResting(conn, rests)
		}
	}()
	var inGuest guest.StreamResult
	args := guest.StreamArgs{Addr: listener.Addr().String(), Receive: toGuest, Bytes: n, Seed: seed, Rests: rests, Timeout: patience}
	if err := e.vm.Agent.Call(guest.CommandStream, args, &inGuest, patience); err != nil {
		return inGuest, err
	}
	other := <-onHost
	received := inGuest
	if !toGuest {
		received = other.StreamResult
	}
	if other.err != nil || inGuest.SHA256 != other.SHA256 || received.Bytes != n {
		return received, fmt.Errorf("in the guest %+v, on the host %+v, %v", inGuest, other.StreamResult, other.err)
	}
	return received, nil
}
