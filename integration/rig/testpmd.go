package rig

import (
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// TestpmdConfig describes DPDK's testpmd with one virtio-user port as the front-end.
type TestpmdConfig struct {
	Socket  string
	Queues  int
	Forward string // forwarding mode: txonly, rxonly, io
	Size    int    // of frames made by txonly
	Device  string // further properties of net_virtio_user, such as mrg_rxbuf=0
	Name    string // file prefix, one for each process
}

// Testpmd is a running testpmd, driven by its commands.
type Testpmd struct{ *Process }

const prompt = "testpmd> "

// StartTestpmd starts it with forwarding stopped. vhostd can map its memory only with single-file segments.
func StartTestpmd(pages *Hugepages, cfg TestpmdConfig) (*Testpmd, error) {
	if _, err := exec.LookPath("dpdk-testpmd"); err != nil {
		return nil, fmt.Errorf("%w: %w", err, ErrNotSetUp)
	}
	queues := max(cfg.Queues, 1)
	device := fmt.Sprintf("net_virtio_user0,path=%s,queues=%d,queue_size=256", cfg.Socket, queues)
	if queues > 1 {
		device += ",cq=1" // virtio-user has more than one pair only with a control queue
	}
	if cfg.Device != "" {
		device += "," + cfg.Device
	}
	// testpmd writes its prompt at once but buffers the answers when its output is a pipe.
	process, err := Start(nil, "stdbuf", "-oL", "dpdk-testpmd",
		"--lcores", "0@0,1@1", "--no-pci", "--single-file-segments", "-m", "512", "--huge-dir", pages.Folder, "--file-prefix", cfg.Name,
		"--vdev", device, "--", "-i", "--forward-mode", cfg.Forward, "--nb-cores=1", fmt.Sprintf("--rxq=%d", queues), fmt.Sprintf("--txq=%d", queues),
		"--rxd=256", "--txd=256", fmt.Sprintf("--txpkts=%d", max(cfg.Size, 64)), "--total-num-mbufs=4096")
	if err != nil {
		return nil, err
	}
	pmd := &Testpmd{process}
	if err := pmd.WaitOutput("prompt", 30*time.Second, func(output string) bool { return strings.Contains(output, prompt) }); err != nil {
		pmd.Kill()
		return nil, err
	}
	return pmd, nil
}

// Command runs a command and returns what it printed.
func (p *Testpmd) Command(line string) (string, error) {
	before := len(p.Output())
	if err := p.Send(line); err != nil {
		return "", err
	}
	var text string
	err := p.WaitOutput("answer to "+line, 20*time.Second, func(output string) bool {
		text = output[min(before, len(output)):]
		return strings.HasSuffix(text, prompt)
	})
	return text, err
}

// PortStats are the counters of the port, as testpmd prints them.
type PortStats struct{ Received, Sent, Missed, Errors uint64 }

var portCounter = regexp.MustCompile(`(RX-packets|TX-packets|RX-missed|RX-errors|TX-errors):\s*(\d+)`)

// Stats reads the port's counters.
func (p *Testpmd) Stats() (PortStats, error) {
	text, err := p.Command("show port stats 0")
	if err != nil {
		return PortStats{}, err
	}
	var stats PortStats
	matches := portCounter.FindAllStringSubmatch(text, -1)
	if len(matches) == 0 {
		return stats, fmt.Errorf("testpmd: no counters in %q", text)
	}
	for _, match := range matches {
		value, err := strconv.ParseUint(match[2], 10, 64)
		if err != nil {
			return stats, err
		}
		switch match[1] {
		case "RX-packets":
			stats.Received = value
		case "TX-packets":
			stats.Sent = value
		case "RX-missed":
			stats.Missed = value
		default:
			stats.Errors += value
		}
	}
	return stats, nil
}

// Quit stops forwarding and ends the process in order.
func (p *Testpmd) Quit() error {
	if err := p.Send("quit"); err != nil {
		return err
	}
	if err := p.Wait(15 * time.Second); err != nil {
		p.Kill()
		return err
	}
	return nil
}
