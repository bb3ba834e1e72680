package rig

import (
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
)

// Ends is a guest's network seen from both sides: the host's address in a namespace, and the guest's.
type Ends struct {
	NS      *Namespace
	VM      *VM
	HostIP  string
	GuestIP string
}

// Stream moves n bytes over TCP between guest and host and returns what each end saw. The guest opens the connection.
func (e Ends) Stream(n int64, seed uint64, toGuest bool, timeout time.Duration) (sent, received guest.StreamResult, err error) {
	return e.StreamUntil(nil, n, seed, toGuest, timeout)
}

// StreamUntil is Stream that the host ends early by closing stop, and the guest by its command calm.
func (e Ends) StreamUntil(stop <-chan struct{}, n int64, seed uint64, toGuest bool, timeout time.Duration) (
	sent, received guest.StreamResult, err error,
) {
	return e.stream(stop, guest.StreamArgs{Receive: toGuest, Bytes: n, Seed: seed, Timeout: timeout})
}

// Zeros is Stream as fast as it goes: what is sent is zeros, and there are no digests.
func (e Ends) Zeros(n int64, toGuest bool, timeout time.Duration) (sent, received guest.StreamResult, err error) {
	return e.stream(nil, guest.StreamArgs{Receive: toGuest, Bytes: n, Zeros: true, Timeout: timeout})
}

func (e Ends) stream(stop <-chan struct{}, args guest.StreamArgs) (sent, received guest.StreamResult, err error) {
	listener, err := e.NS.Listen(net.JoinHostPort(e.HostIP, "0"))
	if err != nil {
		return sent, received, err
	}
	defer listener.Close()
	args.Addr = listener.Addr().String()
	type end struct {
		guest.StreamResult
		err error
	}
	host := make(chan end, 1)
	go func() {
		result, err := serveStream(listener, stop, args)
		host <- end{result, err}
	}()
	var inGuest guest.StreamResult
	if err := e.VM.Agent.Call(guest.CommandStream, args, &inGuest, args.Timeout+callTimeout); err != nil {
		return sent, received, err
	}
	onHost := <-host
	if onHost.err != nil {
		return sent, received, fmt.Errorf("host's end: %w", onHost.err)
	}
	if args.Receive {
		return onHost.StreamResult, inGuest, nil
	}
	return inGuest, onHost.StreamResult, nil
}

// serveStream is the other end of what args are for the guest.
func serveStream(listener net.Listener, stop <-chan struct{}, args guest.StreamArgs) (guest.StreamResult, error) {
	if err := listener.(*net.TCPListener).SetDeadline(time.Now().Add(args.Timeout)); err != nil {
		return guest.StreamResult{}, err
	}
	conn, err := listener.Accept()
	if err != nil {
		return guest.StreamResult{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(args.Timeout)); err != nil {
		return guest.StreamResult{}, err
	}
	switch {
	case args.Zeros && args.Receive:
		return guest.SendZeros(conn, args.Bytes)
	case args.Zeros:
		return guest.ReceiveAny(conn)
	case args.Receive:
		return guest.SendUntil(conn, args.Bytes, args.Seed, stop)
	}
	return guest.ReceiveStream(conn)
}

// Ping sends echo requests from the guest to the host.
func (e Ends) Ping(size, count int) (result guest.PingResult, err error) {
	args := guest.PingArgs{Dst: e.HostIP, Size: size, Count: count, Timeout: 2 * time.Second}
	err = e.VM.Agent.Call(guest.CommandPing, args, &result, time.Duration(count)*2*time.Second+callTimeout)
	return result, err
}

// PingGuest sends echo requests from the host to the guest.
func (e Ends) PingGuest(args guest.PingArgs) (guest.PingResult, error) {
	var pinger *guest.Pinger
	err := e.NS.Do(func() (err error) {
		pinger, err = guest.OpenPinger(e.GuestIP)
		return err
	})
	if err != nil {
		return guest.PingResult{}, err
	}
	defer pinger.Close()
	return pinger.Run(args)
}

// Echo sends datagrams from the guest to an echo server on the host.
func (e Ends) Echo(args guest.EchoArgs) (result guest.EchoResult, err error) {
	conn, err := e.NS.ListenPacket(net.JoinHostPort(e.HostIP, "0"))
	if err != nil {
		return result, err
	}
	defer conn.Close()
	go guest.ServeEcho(conn)
	args.Addr = conn.LocalAddr().String()
	err = e.VM.Agent.Call(guest.CommandEcho, args, &result, time.Duration(args.Count)*args.Timeout+callTimeout)
	return result, err
}

// SinkHost counts numbered datagrams that come to addr from the guest until stop is called.
func (e Ends) SinkHost() (addr string, stop func() guest.SinkResult, err error) {
	conn, err := e.NS.ListenPacket(net.JoinHostPort(e.HostIP, "0"))
	if err != nil {
		return "", nil, err
	}
	const forever = time.Hour
	results := make(chan guest.SinkResult, 1)
	go func() { results <- guest.Sink(conn.(net.Conn), guest.SinkArgs{For: forever, Idle: forever}) }()
	return conn.LocalAddr().String(), func() guest.SinkResult {
		conn.Close()
		return <-results
	}, nil
}

// floodNumber goes on over all floods: the end of one may arrive during the next.
var floodNumber atomic.Int64

// FloodGuest sends numbered datagrams to the guest's port 9 in the background until stop is called.
func (e Ends) FloodGuest(size int) (stop func() guest.FloodResult, err error) {
	conn, err := e.NS.DialUDP(e.GuestIP + ":9")
	if err != nil {
		return nil, err
	}
	results, quit := make(chan guest.FloodResult, 1), make(chan struct{})
	go func() {
		var total guest.FloodResult
		for {
			select {
			case <-quit:
				results <- total
				return
			default:
				// Refusals (port unreachable) are part of it; the pauses leave the guest time for other work.
				part := guest.Flood(conn, guest.FloodArgs{Size: size, First: int(floodNumber.Add(16)), Count: 16, For: 5 * time.Millisecond})
				total.Sent += part.Sent
				total.Errors += part.Errors
				time.Sleep(2 * time.Millisecond)
			}
		}
	}()
	return func() guest.FloodResult {
		close(quit)
		result := <-results
		conn.Close()
		return result
	}, nil
}

// Transfer moves n bytes over TCP from one guest to an address (IP:PORT) of another and returns what each end saw.
func Transfer(from, to *VM, address string, n int64, timeout time.Duration) (sent, received guest.StreamResult, err error) {
	_, text, err := net.SplitHostPort(address)
	if err != nil {
		return sent, received, err
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		return sent, received, err
	}
	type end struct {
		guest.StreamResult
		err error
	}
	serving := make(chan end, 1)
	go func() {
		var e end
		e.err = to.Agent.Call(guest.CommandServe, guest.ServeArgs{Port: port, Timeout: timeout}, &e.StreamResult, timeout+callTimeout)
		serving <- e
	}()
	args := guest.StreamArgs{Addr: address, Bytes: n, Seed: uint64(n), Timeout: timeout}
	if err := from.Agent.Call(guest.CommandStream, args, &sent, timeout+callTimeout); err != nil {
		return sent, received, err
	}
	e := <-serving
	return sent, e.StreamResult, e.err
}
