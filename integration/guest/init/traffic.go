package main

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

func ping(args guest.PingArgs) (guest.PingResult, error) {
	pinger, err := guest.OpenPinger()
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
	if args.Receive {
		return guest.ReceiveStream(conn)
	}
	return guest.SendStream(conn, args.Bytes, args.Seed)
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
	conn, err := net.Dial("udp4", args.Addr)
	if err != nil {
		return guest.EchoResult{}, err
	}
	defer conn.Close()
	return guest.Echo(conn, args)
}

func flood(args guest.FloodArgs) (guest.FloodResult, error) {
	conn, err := net.Dial("udp4", args.Addr)
	if err != nil {
		return guest.FloodResult{}, err
	}
	defer conn.Close()
	return guest.Flood(conn, args), nil
}

func sink(args guest.SinkArgs) (guest.SinkResult, error) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: args.Port})
	if err != nil {
		return guest.SinkResult{}, fmt.Errorf("sink: %w", err)
	}
	defer conn.Close()
	return guest.Sink(conn, args), nil
}
