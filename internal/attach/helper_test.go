package attach

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestInterfaceAnswers: what the helper says of the interface is judged, for the namespace is somebody else's: its owner may have changed
// the MTU, by which buffers are made, as soon as the interface is there. Descriptors of an answer that is refused are closed (TestMain).
func TestInterfaceAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer report
		fds    int
		want   string // "" is none
	}{
		"good":              {report{MTU: 1500}, 2, ""},
		"smallest MTU":      {report{MTU: MinMTU}, 2, ""},
		"MTU too small":     {report{MTU: MinMTU - 1}, 2, "interface eth7 has the MTU 67, accepted are 68 to 65521"},
		"MTU too large":     {report{MTU: MaxMTU + 1}, 2, "interface eth7 has the MTU 65522, accepted are 68 to 65521"},
		"no MTU":            {report{}, 2, "interface eth7 has the MTU 0"},
		"too few queues":    {report{MTU: 1500}, 1, "sent 1 descriptors, 2 are right"},
		"too many queues":   {report{MTU: 1500}, 3, "sent 3 descriptors, 2 are right"},
		"trouble in there":  {report{Error: "interface eth7: create: busy"}, 0, "interface eth7: create: busy"},
		"nothing any more":  {report{}, -1, "the helper in the namespace does not answer"},
		"MTU and no queues": {report{MTU: 1500}, 0, "sent 0 descriptors, 2 are right"},
	} {
		t.Run(name, func(t *testing.T) {
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				t.Fatal(err)
			}
			a := &attachment{link: &link{file: os.NewFile(uintptr(fds[0]), "attachment")}}
			helper := &link{file: os.NewFile(uintptr(fds[1]), "helper")}
			answered := make(chan error, 1)
			go func() { answered <- answerOrder(helper, c.answer, c.fds) }()
			err = a.createInterface(interfaceConfig{Name: "eth7", Queues: 2, Stay: true})
			if failed := <-answered; failed != nil {
				t.Fatal(failed)
			}
			switch {
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error %v, want one with %q", err, c.want)
			case c.want == "" && (err != nil || len(a.taps) != 2 || a.mtu != c.answer.MTU):
				t.Errorf("%v, %d queues, MTU %d", err, len(a.taps), a.mtu)
			}
			closeAll(a.taps)
			_ = helper.file.Close() // closed already where it is gone
			if a.news != nil {
				for range a.news {
				}
			}
			if err := a.link.file.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// answerOrder plays the helper for one order; with less than no descriptors it is gone instead.
func answerOrder(l *link, answer report, n int) error {
	var first order
	if _, err := l.receive(&first); err != nil {
		return err
	}
	if n < 0 {
		return l.file.Close()
	}
	var fds []int
	defer func() { closeAll(fds) }()
	for range n {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	return l.send(answer, fds...)
}
