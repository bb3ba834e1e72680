package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const (
	memory   = "memory"
	udpFlows = "udpflows"
	settle   = 3 * time.Second
	sample   = 10 * time.Second
	minute   = time.Minute
)

// nativePeers are those that are wanted and there.
func (s *settings) nativePeers(r *report) (peers []peer) {
	for _, p := range natives {
		if slices.Contains(s.peers, p.name) && p.present(s, r) {
			peers = append(peers, p)
		}
	}
	return peers
}

// runMemory measures what connections cost that stand and are silent: anonymous memory of the back end before and after. What the kernel
// needs for sockets is not in it.
func runMemory(s *settings, r *report) error {
	peers := s.nativePeers(r)
	return rounds(s, len(peers), func(round, i int) error {
		t, err := peers[i].open(s)
		if err != nil {
			return err
		}
		defer t.close()
		add := func(what, unit string, value float64) { r.add(memory, what, unit, peers[i].name, round, value) }
		if err := t.idleFlows(s, add); err != nil {
			r.note("%s, memory: %v", peers[i].name, err)
		}
		return nil
	})
}

func (t *site) idleFlows(s *settings, add func(what, unit string, value float64)) error {
	addr, stop, err := t.greeter()
	if err != nil {
		return err
	}
	defer stop()
	pid := t.pids()[0]
	before, err := resident(pid)
	if err != nil {
		return err
	}
	p, err := t.startClient(order{Do: "hold", Addr: addr, Count: s.flows, Workers: rateWorkers})
	if err != nil {
		return err
	}
	defer p.Kill()
	whole := func(out string) bool { return len(out) > 0 && out[len(out)-1] == '\n' }
	if err := p.WaitOutput("its connections", clientLimit, whole); err != nil {
		return err
	}
	result, err := answer(p)
	if err != nil {
		return err
	}
	time.Sleep(settle)
	after, err := resident(pid)
	if err != nil {
		return err
	}
	add("idle flows", "", float64(result.Count))
	add("idle flows that failed", "", float64(result.Failed))
	if result.Count == 0 {
		return fmt.Errorf("no flow came about: %s", result.Why)
	}
	add("memory of an idle flow", "kB", (after-before)/1000/float64(result.Count))
	return p.Send("end")
}

// runOneShots sends datagrams for a minute, each from a port of its own, and looks at the back end every ten seconds and once more.
func runOneShots(s *settings, r *report) error {
	for _, p := range s.nativePeers(r) {
		t, err := p.open(s)
		if err != nil {
			return err
		}
		err = t.oneShots(s, func(what, unit string, value float64) { r.add(udpFlows, what, unit, p.name, 0, value) })
		t.close()
		if err != nil {
			r.note("%s, udpflows: %v", p.name, err)
		}
	}
	return nil
}

func (t *site) oneShots(s *settings, add func(what, unit string, value float64)) error {
	conn, err := t.host.ListenPacket(rig.Live4 + ":0")
	if err != nil {
		return err
	}
	defer conn.Close()
	go guest.ServeEcho(conn)
	pids := t.pids()
	idle, err := descriptors(pids[0])
	if err != nil {
		return err
	}
	p, err := t.startClient(order{Do: "one-shots", Addr: conn.LocalAddr().String(), Rate: s.oneShots / 60, For: minute})
	if err != nil {
		return err
	}
	defer p.Kill()
	most := 0
	for at := time.Duration(0); at < minute; at += sample {
		m, err := begin(pids...)
		if err != nil {
			return err
		}
		for range 10 {
			time.Sleep(sample / 10)
			n, err := descriptors(pids[0])
			if err != nil {
				return err
			}
			most = max(most, n-idle)
		}
		cost, err := m.end()
		if err != nil {
			return err
		}
		add(fmt.Sprintf("CPU until second %.0f", (at+sample).Seconds()), "s", sum(cost))
	}
	if err := p.Wait(patience); err != nil {
		return err
	}
	result, err := answer(p)
	if err != nil {
		return err
	}
	add("datagrams", "", float64(result.Count))
	add("datagrams without an answer", "", float64(result.Failed))
	add("sockets at a time, at most", "", float64(most))
	time.Sleep(sample)
	n, err := descriptors(pids[0])
	if err != nil {
		return err
	}
	add("sockets 10 s after the last", "", float64(n-idle))
	return nil
}
