package main

import (
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const (
	native        = "native"
	tripCount     = 5000
	rateWorkers   = 32
	datagramsRate = 20_000 // a second
)

// rounds calls f for each of n things in each round, the other way round in every second one.
func rounds(s *settings, n int, f func(round, i int) error) error {
	for round := range s.rounds {
		for k := range n {
			i := k
			if round%2 == 1 {
				i = n - 1 - k
			}
			if err := f(round, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// runNative measures back ends of a namespace, whose "guest" is this machine's kernel: nothing is emulated. Namespaces and back end are new
// for each measurement, since what one leaves behind, such as ports in TIME_WAIT, would burden the next.
func runNative(s *settings, r *report) error {
	peers := s.nativePeers(r)
	for _, m := range []struct {
		name string
		run  func(*settings, *site, func(what, unit string, value float64)) error
	}{
		{"stream", func(s *settings, t *site, add func(string, string, float64)) error {
			if err := t.stream(s, false, add); err != nil {
				return err
			}
			return t.stream(s, true, add)
		}},
		{"rate", (*settings).measureRate}, {"connects", (*settings).measureConnects}, {"trips", (*settings).measureTrips},
		{"datagrams", (*settings).measureDatagrams},
	} {
		if !s.wants(m.name) {
			continue
		}
		err := rounds(s, len(peers), func(round, i int) error {
			t, err := peers[i].open(s)
			if err != nil && peers[i].name == reference {
				return err
			}
			if err != nil {
				r.note("%s: %v", m.name, err)
				return nil
			}
			defer t.close()
			err = m.run(s, t, func(what, unit string, value float64) { r.add(native, what, unit, peers[i].name, round, value) })
			if err != nil {
				r.note("%s, %s: %v", peers[i].name, m.name, err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// direction names one.
func direction(toGuest bool) string {
	if toGuest {
		return "host->guest"
	}
	return "guest->host"
}

// stream is iperf3's throughput of one connection, and what it costs.
func (t *site) stream(s *settings, toGuest bool, add func(what, unit string, value float64)) error {
	server, err := rig.Start(t.host.Namespace, "iperf3", "-s", "-1", "-B", rig.Live4)
	if err != nil {
		return fmt.Errorf("%w (Debian package iperf3)", err)
	}
	defer server.Kill()
	time.Sleep(200 * time.Millisecond) // it says nothing that could be waited for, and a connection would be its client
	m, err := begin(t.pids()...)
	if err != nil {
		return err
	}
	args := []string{"-c", rig.Live4, "-J", "-t", strconv.FormatFloat(s.length.Seconds(), 'f', 1, 64)}
	if toGuest {
		args = append(args, "-R")
	}
	run, err := rig.Start(t.guest, "iperf3", args...)
	if err != nil {
		return err
	}
	defer run.Kill()
	if err := run.Wait(s.length + patience); err != nil {
		return fmt.Errorf("iperf3: %w: %s", err, run.Output())
	}
	cost, err := m.end()
	if err != nil {
		return err
	}
	var result struct {
		End struct {
			Received struct {
				Bytes float64 `json:"bytes"`
				Rate  float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(run.Output()), &result); err != nil {
		return fmt.Errorf("iperf3: %w: %s", err, run.Output())
	}
	gb := result.End.Received.Bytes / 1e9
	if gb == 0 {
		return fmt.Errorf("iperf3 moved nothing %s", direction(toGuest))
	}
	add("TCP "+direction(toGuest), "Gbit/s", result.End.Received.Rate/1e9)
	add("CPU "+direction(toGuest), "s/GB", sum(cost)/gb)
	if len(cost) > 1 {
		add("CPU "+direction(toGuest)+", back end alone", "s/GB", cost[0]/gb)
	}
	return nil
}

// greeter serves guest.ServeStreams in the host's namespace until stop.
func (t *site) greeter() (addr string, stop func(), err error) {
	listener, err := t.host.Listen(rig.Live4 + ":0")
	if err != nil {
		return "", nil, err
	}
	go guest.ServeStreams(listener, "hello")
	return listener.Addr().String(), func() { listener.Close() }, nil
}

func (s *settings) measureRate(t *site, add func(what, unit string, value float64)) error {
	addr, stop, err := t.greeter()
	if err != nil {
		return err
	}
	defer stop()
	m, err := begin(t.pids()...)
	if err != nil {
		return err
	}
	result, err := t.order(order{Do: "rate", Addr: addr, Workers: rateWorkers, For: s.length})
	if err != nil {
		return err
	}
	cost, err := m.end()
	if err != nil {
		return err
	}
	add("connections, 32 at a time", "1/s", float64(result.Count)/result.Took.Seconds())
	if result.Count > 0 {
		add("CPU of a connection", "us", sum(cost)*1e6/float64(result.Count))
	}
	add("connections that failed", "", float64(result.Failed))
	return nil
}

func (s *settings) measureConnects(t *site, add func(what, unit string, value float64)) error {
	addr, stop, err := t.greeter()
	if err != nil {
		return err
	}
	defer stop()
	for _, n := range []int{200, 1000} {
		result, err := t.order(order{Do: "connects", Addr: addr, Count: n})
		if err != nil {
			return err
		}
		add(fmt.Sprintf("%d connects at once", n), "ms", float64(result.Connects.Took.Microseconds())/1e3)
		add(fmt.Sprintf("%d connects at once, failed", n), "", float64(n-result.Connects.Outcomes[guest.Connected]))
	}
	return nil
}

func (s *settings) measureTrips(t *site, add func(what, unit string, value float64)) error {
	addr, stop, err := t.greeter()
	if err != nil {
		return err
	}
	defer stop()
	result, err := t.order(order{Do: "trips", Addr: addr, Count: tripCount})
	if err != nil {
		return err
	}
	add("TCP request/response p50", "us", float64(result.Trips.Median.Nanoseconds())/1e3)
	add("TCP request/response p99", "us", float64(result.Trips.P99.Nanoseconds())/1e3)
	return nil
}

// measureDatagrams sends at a rate that every peer should carry, each way.
func (s *settings) measureDatagrams(t *site, add func(what, unit string, value float64)) error {
	for _, toGuest := range []bool{false, true} {
		conn, err := t.host.ListenPacket(rig.Live4 + ":0")
		if err != nil {
			return err
		}
		m, err := begin(t.pids()...)
		if err == nil {
			err = s.datagrams(t, conn.(*net.UDPConn), toGuest, m, add)
		}
		conn.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *settings) datagrams(t *site, conn *net.UDPConn, toGuest bool, m *meter, add func(what, unit string, value float64)) error {
	type seen struct {
		n   int
		err error
	}
	o := order{Do: "send", Addr: conn.LocalAddr().String(), Rate: datagramsRate, For: s.length}
	host := make(chan seen, 1)
	if toGuest {
		o.Do = "receive"
		go func() {
			n, err := answerWithMany(conn, s.length)
			host <- seen{n, err}
		}()
	} else {
		go func() {
			n, err := count(conn, patience)
			host <- seen{n, err}
		}()
	}
	result, err := t.order(o)
	if err != nil {
		return err
	}
	other := <-host
	if other.err != nil {
		return other.err
	}
	cost, err := m.end()
	if err != nil {
		return err
	}
	sent, received := result.Count, other.n
	if toGuest {
		sent, received = received, sent
	}
	if received == 0 {
		return fmt.Errorf("none of %d datagrams arrived", sent)
	}
	add("UDP 64 B "+direction(toGuest)+", CPU", "us", sum(cost)*1e6/float64(received))
	add("UDP 64 B "+direction(toGuest)+", lost", "%", 100*(1-float64(received)/float64(sent)))
	return nil
}

// answerWithMany waits for a datagram and answers with many, at the rate.
func answerWithMany(conn *net.UDPConn, length time.Duration) (sent int, err error) {
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	payload := make([]byte, datagramBytes)
	_, to, err := conn.ReadFromUDPAddrPort(payload)
	if err != nil {
		return 0, err
	}
	return pace(datagramsRate, length, func() error {
		_, err := conn.WriteToUDPAddrPort(payload, to)
		return err
	})
}
