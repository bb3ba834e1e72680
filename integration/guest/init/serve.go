package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

// handlers has one function per command; each decodes its own arguments.
var handlers = map[string]func(json.RawMessage) (any, error){
	guest.CommandLink:     handle(link),
	guest.CommandAddress:  handle(addresses),
	guest.CommandPing:     handle(ping),
	guest.CommandStream:   handle(stream),
	guest.CommandServe:    handle(serveStream),
	guest.CommandEcho:     handle(echo),
	guest.CommandFlood:    handle(flood),
	guest.CommandSink:     handle(sink),
	guest.CommandCalm:     handle(calm),
	guest.CommandChannels: handle(guest.SetChannels),
	guest.CommandOffloads: handle(guest.SetOffloads),
	guest.CommandDriver:   handle(driver),
	guest.CommandFile:     handle(file),
	guest.CommandMemory:   handle(memory),
	guest.CommandPower:    handle(power),
	guest.CommandDHCP:     handle(dhcp),
	guest.CommandResolve:  handle(guest.Resolve),
	guest.CommandFetch:    handle(guest.Fetch),
	guest.CommandConnect:  handle(connect),
	guest.CommandDialog:   handle(dialog),
	guest.CommandTrips:    handle(trips),
	guest.CommandSizes:    handle(sizes),
	guest.CommandListen:   handle(listen),
	guest.CommandLoss:     handle(loss),
}

func handle[A, R any](f func(A) (R, error)) func(json.RawMessage) (any, error) {
	return func(raw json.RawMessage) (any, error) {
		var args A
		if len(raw) > 0 {
			if err := json.Unmarshal(raw, &args); err != nil {
				return nil, err
			}
		}
		return f(args)
	}
}

// port writes whole lines; commands that run concurrently share it.
type port struct {
	mutex sync.Mutex
	file  *os.File
}

func (p *port) send(reply guest.Reply) {
	line, err := json.Marshal(reply)
	if err != nil {
		line, _ = json.Marshal(guest.Reply{ID: reply.ID, Error: err.Error()})
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if _, err := p.file.Write(append(line, '\n')); err != nil {
		fmt.Println("init: answer lost:", err)
	}
}

// serve announces the agent and runs commands for ever. A host that goes away and comes back is served again.
func serve(file *os.File, missing string) error {
	p := &port{file: file}
	p.send(guest.Reply{Event: &guest.Event{Kernel: kernelRelease(), Uptime: uptime(), Missing: missing}})
	reader := bufio.NewReader(file)
	for {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			time.Sleep(50 * time.Millisecond) // no host at the other end
			continue
		}
		if err != nil {
			return fmt.Errorf("read commands: %w", err)
		}
		var request guest.Request
		if err := json.Unmarshal(line, &request); err != nil {
			p.send(guest.Reply{Error: fmt.Sprintf("bad request %q: %v", line, err)})
			continue
		}
		go p.run(request)
	}
}

func (p *port) run(request guest.Request) {
	reply := guest.Reply{ID: request.ID}
	defer func() { p.send(reply) }()
	handler, ok := handlers[request.Command]
	if !ok {
		reply.Error = fmt.Sprintf("unknown command %q", request.Command)
		return
	}
	result, err := handler(request.Args)
	if err != nil {
		reply.Error = err.Error()
		return
	}
	if reply.Result, err = json.Marshal(result); err != nil {
		reply.Error = err.Error()
	}
}

func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(name.Release[:])
}

func uptime() (seconds float64) {
	text, err := os.ReadFile("/proc/uptime")
	if err == nil {
		_, _ = fmt.Sscan(strings.TrimSpace(string(text)), &seconds)
	}
	return seconds
}
