package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// order is what a client in the guest's namespace is told to do.
type order struct {
	Do      string        `json:"do"`
	Addr    string        `json:"addr"`
	Count   int           `json:"count,omitempty"`
	Workers int           `json:"workers,omitempty"`
	Rate    int           `json:"rate,omitempty"` // a second
	For     time.Duration `json:"for,omitempty"`
}

// outcome is its answer.
type outcome struct {
	Count    int                 `json:"count"`
	Failed   int                 `json:"failed"`
	Why      string              `json:"why,omitempty"` // of one failure
	Took     time.Duration       `json:"took"`
	Trips    guest.TripsResult   `json:"trips"`
	Connects guest.ConnectResult `json:"connects"`
}

const (
	tripBytes     = 64
	datagramBytes = 64
	clientLimit   = 100 * time.Second
)

// actions are the orders that a client knows.
var actions = map[string]func(order) (outcome, error){
	"rate": rate, "connects": connects, "trips": trips, "send": sendDatagrams, "receive": receiveDatagrams,
	"hold": hold, "one-shots": oneShots,
}

// client is the program's other half, which runs in the guest's namespace: one order on the command line, one line of JSON as the answer.
func client(args []string) int {
	var o order
	if len(args) != 1 || json.Unmarshal([]byte(args[0]), &o) != nil || actions[o.Do] == nil {
		fmt.Fprintln(os.Stderr, "usernet client: started by usernet only")
		return 2
	}
	result, err := actions[o.Do](o)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "usernet client:", err)
		return 1
	}
	return 0
}

// startClient starts one.
func (t *site) startClient(o order) (*rig.Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	return rig.Start(t.guest, self, "client", string(text))
}

// order has a client do something and waits for it.
func (t *site) order(o order) (result outcome, err error) {
	p, err := t.startClient(o)
	if err != nil {
		return result, err
	}
	defer p.Kill()
	if err := p.Wait(clientLimit); err != nil {
		return result, fmt.Errorf("client %s: %w: %s", o.Do, err, p.Output())
	}
	return answer(p)
}

// answer is a client's last line.
func answer(p *rig.Process) (result outcome, err error) {
	lines := strings.Split(strings.TrimSpace(p.Output()), "\n")
	err = json.Unmarshal([]byte(lines[len(lines)-1]), &result)
	return result, err
}

// rate opens connections one after the other in each worker, has a greeting sent over each, and closes it.
func rate(o order) (result outcome, err error) {
	var done, failed atomic.Int64
	var why atomic.Value
	var all sync.WaitGroup
	start := time.Now()
	for range o.Workers {
		all.Go(func() {
			for time.Since(start) < o.For {
				if err := greet(o.Addr); err != nil {
					failed.Add(1)
					why.CompareAndSwap(nil, err.Error())
					continue
				}
				done.Add(1)
			}
		})
	}
	all.Wait()
	result = outcome{Count: int(done.Load()), Failed: int(failed.Load()), Took: time.Since(start)}
	result.Why, _ = why.Load().(string)
	return result, nil
}

func greet(addr string) error {
	conn, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	_, err = guest.ReadLine(conn)
	return err
}

func connects(o order) (result outcome, err error) {
	result.Connects = guest.Connect(guest.ConnectArgs{Addr: o.Addr, Count: o.Count, Echo: true, Timeout: 30 * time.Second})
	return result, nil
}

func trips(o order) (result outcome, err error) {
	conn, err := net.DialTimeout("tcp", o.Addr, patience)
	if err != nil {
		return result, err
	}
	defer conn.Close()
	result.Trips, err = guest.Trips(conn, guest.TripsArgs{Count: o.Count, Size: tripBytes, Timeout: time.Minute})
	return result, err
}

// pace calls f so many times a second, a few at a time.
func pace(perSecond int, length time.Duration, f func() error) (done int, err error) {
	start := time.Now()
	for {
		passed := time.Since(start)
		if passed >= length {
			return done, nil
		}
		for due := int(passed.Seconds() * float64(perSecond)); done < due; done++ {
			if err := f(); err != nil {
				return done, err
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// sendDatagrams sends at a rate. What the kernel refuses counts as failed.
func sendDatagrams(o order) (result outcome, err error) {
	conn, err := net.Dial("udp", o.Addr)
	if err != nil {
		return result, err
	}
	defer conn.Close()
	payload := make([]byte, datagramBytes)
	result.Count, err = pace(o.Rate, o.For, func() error {
		if _, err := conn.Write(payload); err != nil {
			result.Failed++
		}
		return nil
	})
	return result, err
}

// receiveDatagrams asks for datagrams by one of its own and counts them until there have been none for a second.
func receiveDatagrams(o order) (result outcome, err error) {
	conn, err := net.Dial("udp", o.Addr)
	if err != nil {
		return result, err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("send")); err != nil {
		return result, err
	}
	result.Count, err = count(conn.(*net.UDPConn), 5*time.Second)
	return result, err
}

// count reads datagrams until there has been none for a second, or none at all for longer.
func count(conn *net.UDPConn, longer time.Duration) (n int, err error) {
	buffer := make([]byte, 2048)
	for wait := longer; ; wait = time.Second {
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return n, err
		}
		// The deadline is for many: setting it costs more than reading.
		for range 256 {
			_, err := conn.Read(buffer)
			switch {
			case os.IsTimeout(err):
				return n, nil
			case errors.Is(err, unix.ECONNREFUSED):
			case err != nil:
				return n, err
			default:
				n++
			}
		}
	}
}

// hold opens connections, says so and keeps them until a line comes.
func hold(o order) (result outcome, err error) {
	start := time.Now()
	var mu sync.Mutex
	var conns []net.Conn
	var all sync.WaitGroup
	next := atomic.Int64{}
	for range o.Workers {
		all.Go(func() {
			for next.Add(1) <= int64(o.Count) {
				conn, failure := net.DialTimeout("tcp", o.Addr, 10*time.Second)
				if failure == nil {
					_, failure = guest.ReadLine(conn)
				}
				mu.Lock()
				if failure == nil {
					conns = append(conns, conn)
				} else {
					result.Failed, result.Why = result.Failed+1, failure.Error()
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	result.Count, result.Took = len(conns), time.Since(start)
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		return result, err
	}
	_, err = bufio.NewReader(os.Stdin).ReadString('\n')
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return result, err
}

// oneShots sends datagrams from a new socket each and closes it when the answer is there, or not there in a while.
func oneShots(o order) (result outcome, err error) {
	start := time.Now()
	var failed atomic.Int64
	var all sync.WaitGroup
	result.Count, err = pace(o.Rate, o.For, func() error {
		all.Go(func() {
			if !ask(o.Addr) {
				failed.Add(1)
			}
		})
		return nil
	})
	all.Wait()
	result.Failed, result.Took = int(failed.Load()), time.Since(start)
	return result, err
}

func ask(addr string) bool {
	conn, err := net.Dial("udp", addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	payload := make([]byte, datagramBytes)
	if _, err := conn.Write(payload); err != nil {
		return false
	}
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second)) // fails on a closed socket only
	n, err := conn.Read(payload)
	return err == nil && n == datagramBytes
}
