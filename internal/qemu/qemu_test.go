package qemu

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const (
	memfd   = "-object memory-backend-memfd,id=vhostd-mem0,size="
	machine = ",share=on -machine memory-backend=vhostd-mem0"
	netdev  = " -chardev socket,id=vhostd0,path=/s,reconnect=1 -netdev vhost-user,id=vhostd0,chardev=vhostd0"
	device  = " -device virtio-net-pci,netdev=vhostd0"
)

func TestDevice(t *testing.T) {
	for _, tc := range []struct {
		d    Device
		want string
	}{
		{Device{Socket: "/s", QueuePairs: 1}, netdev + device},
		{Device{Socket: "/s", QueuePairs: 4, MAC: "52:54:00:00:00:01", MTU: 9000},
			netdev + ",queues=4" + device + ",mq=on,vectors=10,mac=52:54:00:00:00:01,host_mtu=9000"},
		{Device{Socket: "/s", QueuePairs: 2, Emulated: true}, netdev + ",queues=2" + device + ",mq=on,vectors=0"},
		{Device{Socket: "/a,b", Listen: true},
			" -chardev socket,id=vhostd0,path=/a,,b,server=on,wait=off -netdev vhost-user,id=vhostd0,chardev=vhostd0" + device},
	} {
		if got := strings.Join(tc.d.Args(), " "); got != strings.TrimSpace(tc.want) {
			t.Errorf("%+v:\n%s, want\n%s", tc.d, got, tc.want)
		}
	}
}

// TestWith: what is added to the command lines of users.
func TestWith(t *testing.T) {
	const own = " -object memory-backend-memfd,id=a,size=1G,share=on"
	for _, tc := range []struct{ line, want string }{
		{"", memfd + "128M" + machine + netdev + device},
		{"-m 512", memfd + "512M" + machine + netdev + device},
		{"-m size=1.5G,slots=2,maxmem=8G", memfd + "1.5G" + machine + netdev + device},
		{"-m 1G -m slots=2", memfd + "1G" + machine + netdev + device},
		{"-M q35 -m 2g disk.img", memfd + "2g" + machine + netdev + device},
		{own, "-machine memory-backend=a" + netdev + device},
		{"-object memory-backend-memfd,id=a,size=1G", "-machine memory-backend=a" + netdev + device},
		{"-object memory-backend-file,id=a,size=1G,mem-path=/dev/shm,share=yes", "-machine memory-backend=a" + netdev + device},
		{"-object memory-backend-file,id=a,size=1G,mem-path=/dev/shm,share", "-machine memory-backend=a" + netdev + device},
		{`-object {"qom-type":"memory-backend-file","id":"a","share":true}`, "-machine memory-backend=a" + netdev + device},
		{own + " -machine q35,memory-backend=a", netdev + device},
		{own + " -numa node,memdev=a", netdev + device},
		{"-m 1G" + strings.ReplaceAll(own, "id=a", "id=b") + " -device pc-dimm,memdev=b", memfd + "1G" + machine + netdev + device},
		{"--m 1G -device virtio-net-pci,netdev=vhostd0,packed=on", memfd + "1G" + machine + netdev},
	} {
		words := append([]string{"qemu"}, strings.Fields(tc.line)...)
		c, err := Read(words)
		if err != nil {
			t.Errorf("%s: %v", tc.line, err)
			continue
		}
		got, err := c.With(Device{Socket: "/s", QueuePairs: 1})
		if want := append(slices.Clone(words), strings.Fields(tc.want)...); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s:\n%q, %v, want\n%q", tc.line, got, err, want)
		}
	}
}

// TestConflicts: the error names the option and what to write instead.
func TestConflicts(t *testing.T) {
	for line, want := range map[string]string{
		"-m lots":           `-m: "lots": accepted are sizes such as 512M and 2G`,
		"-m 0":              `-m: "0": accepted are`,
		"-m":                "-m: its value is missing",
		"-daemonize":        "-daemonize: QEMU must stay in the foreground",
		"-mem-path /dev/hp": "-mem-path /dev/hp: this memory is not shared with the back-end: write -object memory-backend-file,id=mem0,size=SIZE,mem-path=/dev/hp,share=on",
		"-object memory-backend-ram,id=a,size=1G,share=on":                    "cannot be shared with the back-end: write memory-backend-memfd and share=on",
		"-object memory-backend-file,id=a,size=1G,mem-path=/x":                "not shared with the back-end: add share=on",
		"-object memory-backend-memfd,id=a,size=1G,share=off":                 "not shared with the back-end: add share=on",
		"-numa node,mem=512M":                                                 "write -object memory-backend-memfd,id=ID,size=512M,share=on -numa node,memdev=ID",
		"-object memory-backend-memfd,id=a -object memory-backend-memfd,id=b": "which of a and b is the guest's memory? Say -machine memory-backend=ID",
		"-netdev user,id=vhostd0":                                             "-netdev user,id=vhostd0: vhostd uses the id vhostd0 itself: choose another one",
		"-chardev null,id=vhostd0":                                            "choose another one",
		"-object rng-random,id=vhostd-mem0":                                   "choose another one",
		"-object {":                                                           "is no JSON",
	} {
		c, err := Read(append([]string{"qemu"}, strings.Fields(line)...))
		if err == nil {
			_, err = c.With(Device{Socket: "/s"})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}

func TestMachine(t *testing.T) {
	for _, tc := range []struct {
		line     string
		emulated bool
		cpus     int
	}{
		{"", true, 1},
		{"-enable-kvm -smp 4", false, 4},
		{"-M q35,accel=kvm -smp cpus=2,maxcpus=8", false, 2},
		{"-machine accel=kvm:tcg -smp 3,sockets=3", true, 3},
		{"-accel kvm -accel tcg -smp sockets=2,cores=2,threads=2", true, 8},
		{"-accel tcg,thread=single -smp many", true, 1},
		{"-accel kvm", false, 1},
	} {
		c, err := Read(append([]string{"qemu"}, strings.Fields(tc.line)...))
		if err != nil || c.Emulated() != tc.emulated || c.CPUs() != tc.cpus {
			t.Errorf("%s: emulated %v, %d CPUs, %v", tc.line, c.Emulated(), c.CPUs(), err)
		}
	}
}

// TestQuote lets a shell read the words again.
func TestQuote(t *testing.T) {
	words := []string{"-a", "", "it's", `"$HOME"`, "a b", "new\nline", "k=v,x:/y", "*"}
	out, err := exec.Command("sh", "-c", "printf '%s|' "+Quote(words)).Output()
	if want := strings.Join(words, "|") + "|"; err != nil || string(out) != want {
		t.Errorf("%q, %v, want %q", out, err, want)
	}
}
