package hostile

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// heldPipe is a pipe with something in it whose lock another thread holds, for as long as the socket that it splices from is empty:
// whoever reads the pipe waits in the kernel, and no signal ends that.
func heldPipe(t *testing.T) (read int, release func()) {
	t.Helper()
	var pipe [2]int
	must(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	socket, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	_, err = unix.Write(pipe[1], []byte("8 bytes."))
	must(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = unix.Splice(socket[0], nil, pipe[1], nil, 1<<16, 0)
	}()
	time.Sleep(50 * time.Millisecond)
	return pipe[0], sync.OnceFunc(func() {
		unix.Close(socket[1])
		<-ended
		for _, fd := range []int{socket[0], pipe[0], pipe[1]} {
			unix.Close(fd)
		}
	})
}

// TestHeldPipe: a pipe whose lock somebody holds keeps no other guest waiting.
func TestHeldPipe(t *testing.T) {
	for name, attack := range map[string]func(c *frontend.Client, pipe int){
		"kick": func(c *frontend.Client, pipe int) { _ = c.SetVringKick(0, pipe) },
		"device state": func(c *frontend.Client, pipe int) {
			_, _, _ = c.Stop(0)
			_ = c.SetDeviceStateFD(vhostuser.StateLoad, pipe)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, true)
			pipe, release := heldPipe(t)
			t.Cleanup(release) // before the end of vhostd, which waits for its threads
			_, good := d.guest("good", frontend.Options{})
			c, _ := d.guest("evil", frontend.Options{})
			attack(c, pipe)
			if w := worst(t, good, 300*time.Millisecond); w > 500*time.Millisecond {
				t.Errorf("the good guest waited for %v", w)
			}
		})
	}
}
