package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const (
	ringSize = 1024
	batch    = 32
	warmUp   = 200 * time.Millisecond
	patience = 10 * time.Second
	tick     = 10 * time.Millisecond // unit of /proc/PID/stat, 1/USER_HZ
)

// pin binds this thread, and with it what it starts until those bind themselves, to a processor.
func pin(cpu int) error {
	runtime.LockOSThread()
	if cpu < 0 {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	return unix.SchedSetaffinity(0, &set)
}

// bench is a running vhostd with two front-ends.
type bench struct {
	process  *exec.Cmd
	folder   string
	output   bytes.Buffer
	memories [2]*frontend.Memory
	clients  [2]*frontend.Client
	pairs    [2]*frontend.Pair
	frame    []byte
	received []byte // scratch
	sent     uint64
	arrived  uint64
}

func measure(binary, cpus string, c cell, length time.Duration) (r result, err error) {
	b := &bench{frame: make([]byte, c.size)}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.start(binary, "--wake", c.wake, "--cpus", cpus); err != nil {
		return r, err
	}
	if err := b.acquaint(); err != nil {
		return r, err
	}
	if err := b.drive(warmUp); err != nil {
		return r, err
	}
	sent, arrived := b.sent, b.arrived
	cpu, err := b.cpu()
	if err != nil {
		return r, err
	}
	begin := time.Now()
	if err := b.drive(length); err != nil {
		return r, err
	}
	took := time.Since(begin)
	after, err := b.cpu()
	if err != nil {
		return r, err
	}
	n := float64(b.arrived - arrived)
	if n == 0 {
		return r, errors.New("no frame arrived")
	}
	return result{rate: n / took.Seconds(), cpu: float64((after - cpu).Nanoseconds()) / n, lost: 1 - n/float64(b.sent-sent)}, nil
}

// start runs vhostd with two guests on a switch and connects both.
func (b *bench) start(binary string, flags ...string) (err error) {
	if b.folder, err = os.MkdirTemp("", "vhostd-bench"); err != nil {
		return err
	}
	sockets := [2]string{filepath.Join(b.folder, "a"), filepath.Join(b.folder, "b")}
	config := filepath.Join(b.folder, "config.yaml")
	text := fmt.Sprintf("guests:\n- {name: a, socket: %s, network: 'switch,name=lan'}\n- {name: b, socket: %s, network: 'switch,name=lan'}\n", sockets[0], sockets[1])
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	args := append([]string{"serve", "--config", config}, flags...)
	b.process = exec.Command(binary, args...)
	b.process.Stdout, b.process.Stderr = &b.output, &b.output
	b.process.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := b.process.Start(); err != nil {
		return err
	}
	for i, socket := range sockets {
		if err := b.connect(i, socket); err != nil {
			return fmt.Errorf("%w; output of vhostd:\n%s", err, b.output.String())
		}
	}
	return nil
}

func (b *bench) connect(i int, socket string) (err error) {
	if b.memories[i], err = frontend.NewMemory(32 << 20); err != nil {
		return err
	}
	const features = virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc | virtio.FRingEventIdx
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		b.clients[i], err = frontend.Connect(socket, b.memories[i], frontend.Options{Features: features, RingSize: ringSize})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	if b.pairs[i], err = b.clients[i].StartPair(0); err != nil {
		return err
	}
	if _, err = b.pairs[i].PostRx(ringSize); err != nil {
		return err
	}
	return b.clients[i].Sync()
}

// acquaint lets the switch know where both stations are, and prepares the frame from one to the other.
func (b *bench) acquaint() error {
	addresses := [2][]byte{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	for i := range b.pairs {
		copy(b.frame, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		copy(b.frame[6:], addresses[i])
		binary.BigEndian.PutUint16(b.frame[12:], 0x88b5) // a local experimental EtherType
		if err := b.pairs[i].SendTx(virtio.NetHdr{}, b.frame, frontend.Direct); err != nil {
			return err
		}
		if _, _, err := b.pairs[1-i].RecvFrame(patience); err != nil {
			return err
		}
	}
	copy(b.frame, addresses[1])
	copy(b.frame[6:], addresses[0])
	return nil
}

// drive sends and receives in turn.
func (b *bench) drive(length time.Duration) error {
	from, to := b.pairs[0], b.pairs[1]
	for end := time.Now().Add(length); time.Now().Before(end); {
		for range batch {
			if err := from.Stage(virtio.NetHdr{}, b.frame, frontend.Direct); errors.Is(err, frontend.ErrFull) {
				break
			} else if err != nil {
				return err
			}
			b.sent++
		}
		if err := from.TX.Flush(); err != nil {
			return err
		}
		for range 2 * batch {
			_, frame, ok, err := to.AppendRecv(b.received[:0])
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			b.received = frame
			b.arrived++
		}
		if _, err := to.PostRx(ringSize); err != nil {
			return err
		}
	}
	return nil
}

// cpu is the processor time that vhostd has used: utime and stime, fields 14 and 15 of /proc/PID/stat (proc(5)).
func (b *bench) cpu() (used time.Duration, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", b.process.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(string(field), 10, 64)
		if err != nil {
			return 0, err
		}
		used += time.Duration(n) * tick
	}
	return used, nil
}

func (b *bench) close() error {
	var errs []error
	for i := range b.clients {
		if b.clients[i] != nil {
			errs = append(errs, b.clients[i].Close())
		}
		if b.memories[i] != nil {
			errs = append(errs, b.memories[i].Close())
		}
	}
	if b.process != nil && b.process.Process != nil {
		errs = append(errs, b.process.Process.Signal(unix.SIGTERM), b.process.Wait())
	}
	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}
