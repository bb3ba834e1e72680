package rig

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
)

// Agent is the connection to a guest's init. Calls may come from several goroutines and run in the guest at the same time.
type Agent struct {
	conn  net.Conn
	ready chan guest.Event

	mutex   sync.Mutex
	next    uint64
	waiting map[uint64]chan guest.Reply
}

// DialAgent connects to the virtio-serial port's socket; the guest need not have booted.
func DialAgent(process *Process, path string, timeout time.Duration) (*Agent, error) {
	conn, err := dialUnix(process, path, timeout)
	if err != nil {
		return nil, err
	}
	a := &Agent{conn: conn, ready: make(chan guest.Event, 16), waiting: make(map[uint64]chan guest.Reply)}
	go a.read()
	return a, nil
}

func (a *Agent) read() {
	reader := bufio.NewReader(a.conn)
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			a.failAll(fmt.Sprintf("connection to the guest lost: %v", err))
			close(a.ready)
			return
		}
		var reply guest.Reply
		if err := json.Unmarshal(line, &reply); err != nil {
			continue // a line cut off by a reset
		}
		if reply.Event != nil {
			a.failAll("the guest has booted again")
			a.ready <- *reply.Event
			continue
		}
		a.deliver(reply)
	}
}

func (a *Agent) deliver(reply guest.Reply) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if waiter, ok := a.waiting[reply.ID]; ok {
		delete(a.waiting, reply.ID)
		waiter <- reply
	}
}

func (a *Agent) failAll(reason string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for id, waiter := range a.waiting {
		delete(a.waiting, id)
		waiter <- guest.Reply{ID: id, Error: reason}
	}
}

// WaitReady waits until the guest has booted, once for each boot.
func (a *Agent) WaitReady(timeout time.Duration) (guest.Event, error) {
	select {
	case event, ok := <-a.ready:
		if !ok {
			return event, errors.New("the guest ended before it had booted")
		}
		return event, nil
	case <-time.After(timeout):
		return guest.Event{}, fmt.Errorf("the guest did not boot within %v", timeout)
	}
}

// Call runs a command in the guest; result may be nil.
func (a *Agent) Call(command string, args, result any, timeout time.Duration) error {
	raw, err := json.Marshal(args)
	if err != nil {
		return err
	}
	answer, err := a.send(guest.Request{Command: command, Args: raw})
	if err != nil {
		return fmt.Errorf("guest %s: %w", command, err)
	}
	select {
	case reply := <-answer:
		if reply.Error != "" {
			return fmt.Errorf("guest %s %s: %s", command, raw, reply.Error)
		}
		if result == nil {
			return nil
		}
		return json.Unmarshal(reply.Result, result)
	case <-time.After(timeout):
		return fmt.Errorf("guest %s %s: no answer within %v", command, raw, timeout)
	}
}

func (a *Agent) send(request guest.Request) (<-chan guest.Reply, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.next++
	request.ID = a.next
	line, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	answer := make(chan guest.Reply, 1)
	a.waiting[request.ID] = answer
	_, err = a.conn.Write(append(line, '\n'))
	return answer, err
}

// Adopt takes over the calls that wait for answers: the guest of the other agent has moved here.
func (a *Agent) Adopt(from *Agent) {
	from.mutex.Lock()
	defer from.mutex.Unlock()
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.next, a.waiting = from.next, from.waiting
	from.waiting = make(map[uint64]chan guest.Reply)
}

// Close closes the connection; pending calls fail.
func (a *Agent) Close() error { return a.conn.Close() }
