package hostile

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// TestStalledLog: whoever reads the log may stop; neither the good guest nor the end of the program waits for it.
func TestStalledLog(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "vhostd.yaml")
	must(t, os.WriteFile(file, []byte("guests:\n- {name: good, socket: "+dir+"/good, network: echo}\n- {name: evil, socket: "+dir+"/evil, network: echo}\n"), 0o600))
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 4096)
	must(t, err)
	cmd := exec.Command(programs[true], "serve", "--config", file)
	cmd.Stderr = w
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	w.Close()
	ended := make(chan error, 1)
	defer func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			<-ended
		}
	}()
	ready := make([]byte, 9)
	_, err = io.ReadFull(out, ready)
	must(t, err)
	go func() { ended <- cmd.Wait() }()

	d := &vhostd{t: t, dir: dir}
	_, good := d.guest("good", frontend.Options{})
	for range 60 {
		mem, err := frontend.NewMemory(8 << 20)
		must(t, err)
		c, err := frontend.Connect(filepath.Join(dir, "evil"), mem, frontend.Options{Features: features, RingSize: 64})
		if err == nil {
			if p, err := c.StartPair(0); err == nil {
				p.TX.Ring.PokeAvailIdx(1000) // breaks the ring, of which the worker tells
				_ = p.TX.Kick()
				_ = c.Sync()
			}
			c.Close()
		}
		must(t, mem.Close())
		ping(t, good)
		time.Sleep(10 * time.Millisecond)
	}
	begin := time.Now()
	must(t, cmd.Process.Signal(unix.SIGTERM))
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("end of vhostd: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("vhostd does not end")
	}
	t.Logf("ended after %v", time.Since(begin))
	text, err := io.ReadAll(r)
	must(t, err)
	if strings.Contains(string(text), "DATA RACE") {
		t.Errorf("%s", text)
	}
}
