package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

func ping(args guest.PingArgs) (guest.PingResult, error) {
	pinger, err := guest.OpenPinger(args.Dst)
	if err != nil {
		return guest.PingResult{}, err
	}
	defer pinger.Close()
	return pinger.Run(args)
}

func stream(args guest.StreamArgs) (guest.StreamResult, error) {
	deadline := time.Now().Add(args.Timeout)
	conn, err := dial(args.Addr, deadline)
	if err != nil {
		return guest.StreamResult{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return guest.StreamResult{}, err
	}
	switch {
	case args.Zeros && args.Receive:
		return guest.ReceiveAny(conn)
	case args.Zeros:
		return guest.SendZeros(conn, args.Bytes)
	case args.Receive:
		return guest.ReceiveResting(conn, args.Rests)
	}
	return guest.SendUntil(conn, args.Bytes, args.Seed, untilCalm().Done())
}

// dial tries again while nobody listens.
func dial(address string, deadline time.Time) (net.Conn, error) {
	for {
		conn, err := net.DialTimeout("tcp", address, time.Until(deadline))
		if !errors.Is(err, unix.ECONNREFUSED) || time.Now().After(deadline) {
			return conn, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func connect(args guest.ConnectArgs) (guest.ConnectResult, error) { return guest.Connect(args), nil }

func dialog(args guest.DialogArgs) (guest.DialogResult, error) {
	conn, err := net.DialTimeout("tcp", args.Addr, args.Timeout)
	if err != nil {
		return guest.DialogResult{}, err
	}
	defer conn.Close()
	return guest.Dialog(conn.(*net.TCPConn), args)
}

func trips(args guest.TripsArgs) (guest.TripsResult, error) {
	conn, err := net.DialTimeout("tcp", args.Addr, args.Timeout)
	if err != nil {
		return guest.TripsResult{}, err
	}
	defer conn.Close()
	return guest.Trips(conn, args)
}

func sizes(args guest.SizesArgs) (guest.SizesResult, error) {
	conn, err := net.Dial("udp", args.Addr)
	if err != nil {
		return guest.SizesResult{}, err
	}
	defer conn.Close()
	return guest.Sizes(conn, args)
}

// listen starts echo services for TCP and UDP, over IPv4 and IPv6.
func listen(args guest.ListenArgs) (struct{}, error) {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{Port: args.Port})
	if err != nil {
		return struct{}{}, err
	}
	conn, err := net.ListenUDP("udp", &net.UDPAddr{Port: args.Port})
	if err != nil {
		listener.Close()
		return struct{}{}, err
	}
	go guest.ServeStreams(listener, "hello from the guest")
	go guest.ServeEcho(conn)
	return struct{}{}, nil
}

func serveStream(args guest.ServeArgs) (guest.StreamResult, error) {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{Port: args.Port})
	if err != nil {
		return guest.StreamResult{}, err
	}
	defer listener.Close()
	deadline := time.Now().Add(args.Timeout)
	if err := listener.SetDeadline(deadline); err != nil {
		return guest.StreamResult{}, err
	}
	conn, err := listener.Accept()
	if err != nil {
		return guest.StreamResult{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return guest.StreamResult{}, err
	}
	return guest.ReceiveStream(conn)
}

func echo(args guest.EchoArgs) (guest.EchoResult, error) {
	conn, err := net.Dial("udp", args.Addr)
	if err != nil {
		return guest.EchoResult{}, err
	}
	defer conn.Close()
	return guest.Echo(conn, args)
}

// lasting is the context of what is under way and could last long.
var lasting struct {
	sync.Mutex
	ctx context.Context
	end context.CancelFunc
}

// untilCalm is a context that ends with the next calm.
func untilCalm() context.Context {
	lasting.Lock()
	defer lasting.Unlock()
	if lasting.ctx == nil {
		lasting.ctx, lasting.end = context.WithCancel(context.Background())
	}
	return lasting.ctx
}

func calm(struct{}) (struct{}, error) {
	lasting.Lock()
	defer lasting.Unlock()
	if lasting.ctx != nil {
		lasting.end()
		lasting.ctx = nil
	}
	return struct{}{}, nil
}

func flood(args guest.FloodArgs) (guest.FloodResult, error) {
	conn, err := net.Dial("udp", args.Addr)
	if err != nil {
		return guest.FloodResult{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(untilCalm(), func() { conn.Close() })()
	return guest.Flood(conn, args), nil
}

func sink(args guest.SinkArgs) (guest.SinkResult, error) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: args.Port})
	if err != nil {
		return guest.SinkResult{}, fmt.Errorf("sink: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(untilCalm(), func() { conn.Close() })()
	return guest.Sink(conn, args), nil
}
