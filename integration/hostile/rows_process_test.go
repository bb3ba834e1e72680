package hostile

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// loadEnv has the test program be a front-end at that socket which only sends, until it is killed.
const loadEnv = "VHOSTD_TEST_LOAD"

// loadFrontEnd is that front-end. It says so when its frames go round.
func loadFrontEnd(path string) error {
	mem, err := frontend.NewMemory(64 << 20)
	if err != nil {
		return err
	}
	c, err := frontend.Connect(path, mem, frontend.Options{Features: features})
	if err != nil {
		return err
	}
	p, err := c.StartPair(0)
	if err != nil {
		return err
	}
	for back := 0; ; {
		if _, err := p.PostRx(64); err != nil {
			return err
		}
		for range 32 {
			if err := p.Stage(virtio.NetHdr{}, frameOf(1000, 1), frontend.Indirect); err != nil && !errors.Is(err, frontend.ErrFull) {
				return err
			}
		}
		if err := p.TX.Flush(); err != nil {
			return err
		}
		for range 32 {
			if _, _, ok, err := p.TryRecv(); err != nil || !ok {
				break
			}
			if back++; back == 100 {
				fmt.Println("under load")
			}
		}
	}
}

// killedUnderLoad starts the front-end and kills it under load.
func (a *attack) killedUnderLoad() {
	a.t.Helper()
	a.settled("evil")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), loadEnv+"="+filepath.Join(a.dir, "evil"))
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(a.t, err)
	must(a.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		a.t.Errorf("the front-end: %q, %v", line, err)
	}
	must(a.t, cmd.Process.Kill())
	_ = cmd.Wait()
}

var processRows = []row{
	{"C85", "frontend_killed_under_load_and_many_connections", func(a *attack) {
		for range 3 {
			a.killedUnderLoad()
		}
		a.settled("evil")
		before, cycles := a.held(), 1000
		if os.Getenv("VHOSTD_LONG") == "1" {
			cycles = 10000
		}
		for i := range cycles {
			c, err := frontend.Dial(filepath.Join(a.dir, "evil"))
			if errors.Is(err, unix.EAGAIN) {
				time.Sleep(time.Millisecond) // the backlog is full
				continue
			}
			must(a.t, err)
			if i%4 == 0 {
				_ = c.Send(vhostuser.ReqSetVringCall, vhostuser.FlagVersion, word(0), 0)
			}
			must(a.t, c.Close())
			if i%50 == 49 { // the program keeps up, or the next one waits behind all of them
				eventually(a.t, "a connection is answered", a.answered)
			}
		}
		a.settled("evil")
		a.flat(before)
		_, p := a.running(frontend.Options{})
		a.flows(p)
	}},
	{"C86", "out_of_descriptors", func(a *attack) {
		var limit unix.Rlimit
		must(a.t, unix.Prlimit(a.PID(), unix.RLIMIT_NOFILE, nil, &limit))
		for spare := range uint64(6) {
			a.settled("evil")
			time.Sleep(20 * time.Millisecond) // the control socket may just be closing a connection
			must(a.t, unix.Prlimit(a.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: a.lowestFree() + spare, Max: limit.Max}, nil))
			c, err := frontend.Dial(filepath.Join(a.dir, "evil"))
			must(a.t, err)
			c.Timeout = 300 * time.Millisecond // without a descriptor it is not even accepted
			for i := range 6 {
				if err = c.Send(vhostuser.ReqSetVringCall, vhostuser.FlagVersion, word(uint64(i)), 0, 0); err != nil {
					break
				}
			}
			a.t.Logf("%d descriptors left: %v, %v", spare, err, c.Sync())
			must(a.t, c.Close())
			must(a.t, unix.Prlimit(a.PID(), unix.RLIMIT_NOFILE, &limit, nil))
			c2, p := a.running(frontend.Options{})
			a.flows(p)
			must(a.t, c2.Close())
		}
	}},
	{"C87", "stale_socket_file_and_socket_removed", func(a *attack) {
		own := a.another()
		own.killed = true
		own.Kill()
		if _, err := os.Stat(own.socket()); err != nil {
			a.t.Fatalf("a program that was killed leaves no socket file: %v", err)
		}
		own = a.anotherIn(own.dir)
		_, p := own.guest("good", frontend.Options{})
		own.flows(p)
		must(a.t, os.Remove(own.socket()))
		own.flows(p) // who is connected notices nothing
		must(a.t, own.Stop(patience))
	}},
	{"C88", "stopped_with_active_rings", func(a *attack) {
		for _, f := range []virtio.Features{features, features | virtio.FRingPacked} {
			a.in(f.String(), func(a *attack) {
				own := a.another("state-dir: " + a.t.TempDir())
				mem := memory(a.t, 64<<20)
				opts := frontend.Options{Features: f, RingSize: 256}
				c, err := frontend.Connect(own.socket(), mem, opts)
				must(a.t, err)
				p, err := c.StartPair(0)
				must(a.t, err)
				must(a.t, c.Sync())
				for range 2 {
					_, err := p.PostRx(256)
					must(a.t, err)
					for i := range 200 {
						must(a.t, p.Stage(virtio.NetHdr{}, frameOf(1000, byte(i)), frontend.Direct))
					}
					must(a.t, p.TX.Flush())
					must(a.t, own.Stop(patience))
					if _, err := p.ReapTx(); err != nil { // what is used was sent, once each
						a.t.Fatal(err)
					}
					if r := p.TX.Ring; r != nil && r.PeekUsedIdx() != r.LastUsed() {
						a.t.Errorf("used index %d, of which %d are there", r.PeekUsedIdx(), r.LastUsed())
					}
					c.Release()
					must(a.t, c.Close())
					own = a.anotherIn(own.dir, own.extra...)
					c, err = frontend.Connect(own.socket(), mem, opts)
					must(a.t, err)
					c.Adopt(p)
					_, err = c.StartPair(0)
					must(a.t, err)
					must(a.t, p.DrainTx(patience))
					a.drainRx(p)
				}
				own.flows(p)
				must(a.t, c.Close())
				must(a.t, own.Stop(patience))
			})
		}
	}},
}

// another starts a program of its own with the guest good, for a row that ends it.
func (a *attack) another(extra ...string) *own {
	a.t.Helper()
	return a.anotherIn(a.t.TempDir(), extra...)
}

// own is a program that only one row uses.
type own struct {
	*attack
	extra []string
}

func (o *own) socket() string { return filepath.Join(o.dir, "good") }

func (a *attack) anotherIn(dir string, extra ...string) *own {
	a.t.Helper()
	d := serveIn(a.t, true, dir, []string{"{name: good, socket: %s/good, network: echo}"}, extra...)
	return &own{&attack{vhostd: d, t: a.t}, extra}
}

// answered connects as evil and reports whether that is the one that is served.
func (a *attack) answered() bool {
	c, err := frontend.Dial(filepath.Join(a.dir, "evil"))
	if err != nil {
		return false
	}
	defer c.Close()
	return c.Sync() == nil
}

// lowestFree is the number that the program's next descriptor gets.
func (d *vhostd) lowestFree() (n uint64) {
	for ; ; n++ {
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", d.PID(), n)); err != nil {
			return n
		}
	}
}

// postcopyOrders plays wrong orders with a program that offers postcopy, if it works here.
func (a *attack) postcopyOrders() {
	a.t.Helper()
	own := a.another("postcopy: \"on\"")
	connect := func() *frontend.Conn {
		c, err := frontend.Dial(own.socket())
		must(a.t, err)
		a.t.Cleanup(func() { c.Close() })
		p, err := c.GetProtocolFeatures()
		must(a.t, err)
		if p&vhostuser.ProtoPagefault == 0 {
			testmain.Skip(a.t, "vhostd finds that postcopy does not work here:\n%s", own.Output())
		}
		must(a.t, c.SetProtocolFeatures(p))
		return c
	}
	end := func(c *frontend.Conn) { must(a.t, c.Close()); own.settled("good") }
	advise := func(c *frontend.Conn) {
		fd, err := c.PostcopyAdvise()
		must(a.t, err)
		must(a.t, unix.Close(fd))
	}
	c := connect()
	a.refused("LISTEN before ADVISE", c.PostcopyListen())
	a.refused("END before ADVISE", c.PostcopyEnd())
	advise(c)
	a.refused("END before LISTEN", c.PostcopyEnd())
	if fd, err := c.PostcopyAdvise(); err != nil || fd >= 0 {
		a.t.Errorf("second ADVISE: descriptor %d, %v", fd, err)
	}
	must(a.t, c.PostcopyListen())
	a.refused("second LISTEN", c.PostcopyListen())
	must(a.t, c.PostcopyEnd())
	end(c)
	mem := memory(a.t, 8<<20)
	specs, fds := mem.Table()
	for what, violate := range map[string]func(c *frontend.Conn) error{
		"another message instead of the confirmation": func(c *frontend.Conn) error { return c.Send(vhostuser.ReqSetVringNum, 1, state(0, 256)) },
		"a confirmation that says no":                 func(c *frontend.Conn) error { return c.PostcopyAck(vhostuser.ReqSetMemTable, 1) },
		"no confirmation":                             func(c *frontend.Conn) error { return c.CloseWrite() },
	} {
		c := connect()
		advise(c)
		must(a.t, c.PostcopyListen())
		_, err := c.SetMemTableListening(specs, fds)
		must(a.t, err)
		must(a.t, violate(c))
		if err := c.AwaitClose(patience); err != nil {
			a.t.Errorf("%s: %v", what, err)
		}
		end(c)
	}
	must(a.t, own.Stop(patience))
}
