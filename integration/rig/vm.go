package rig

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
)

// bootTimeout is generous: an emulated guest on a busy machine of two cores.
const bootTimeout = 300 * time.Second

// callTimeout is for commands of the machine protocol and short ones of the guest.
const callTimeout = 30 * time.Second

// GuestMAC is the address of a guest's first interface unless another one is given.
const GuestMAC = "52:54:00:12:34:56"

// VMConfig describes a QEMU machine with one vhost-user network device. Zero fields give one queue pair, one CPU, 512 MiB, GuestMAC.
type VMConfig struct {
	Socket     string // of the back-end
	Listen     bool   // QEMU listens on Socket and the back-end connects; otherwise QEMU connects, and again when the back-end comes back
	QueuePairs int
	MAC        string // of the interface
	Device     string // further properties of virtio-net-pci, such as mrg_rxbuf=off,host_mtu=9000
	CPUs       int
	MemoryMiB  int
	SlotsMiB   int    // room for memory to plug in, in 16 slots
	Paused     bool   // do not run the guest
	IOMMU      bool   // the network device is behind an Intel IOMMU
	Incoming   string // URI at which QEMU waits for a guest that migrates here
	Private    bool   // memory that is not shared, which vhost-user cannot work with
	Netdev     string // instead of vhost-user, such as user,id=n0
	Namespace  *Namespace
	// Run is a command to which QEMU's command line is given, without anything about memory and network: vhostd run and its flags.
	Run []string
}

// VM is a running QEMU.
type VM struct {
	*Process
	QMP    *QMP
	Agent  *Agent
	folder string // of its sockets
}

// StartVM starts QEMU and returns when the machine is complete, before the guest has booted. folder holds the sockets.
func StartVM(folder string, image Image, cfg VMConfig) (*VM, error) {
	vm, err := StartQEMU(folder, image, cfg)
	if err != nil {
		return nil, err
	}
	if vm.QMP, err = DialQMP(vm.Process, filepath.Join(vm.folder, "qmp"), callTimeout); err == nil {
		vm.Agent, err = DialAgent(vm.Process, filepath.Join(vm.folder, "agent"), callTimeout)
	}
	if err != nil {
		vm.Close()
		return nil, fmt.Errorf("QEMU: %w\n%s", err, vm.Output())
	}
	return vm, nil
}

// StartQEMU only starts the process: for machines that are not expected to work. The VM has no QMP and no Agent.
func StartQEMU(folder string, image Image, cfg VMConfig) (*VM, error) {
	folder, err := os.MkdirTemp(folder, "vm")
	if err != nil {
		return nil, err
	}
	program := os.Getenv("VHOSTD_QEMU")
	if program == "" {
		program = "qemu-system-x86_64"
	}
	args := qemuArgs(image, cfg, filepath.Join(folder, "qmp"), filepath.Join(folder, "agent"))
	if len(cfg.Run) > 0 {
		args = append(append(slices.Clone(cfg.Run[1:]), "--", program), args...)
		program = cfg.Run[0]
	}
	process, err := Start(cfg.Namespace, program, args...)
	if err != nil {
		return nil, err
	}
	return &VM{Process: process, folder: folder}, nil
}

// qemuArgs is the command line. vectors=0: QEMU 7.2 under emulation crashes with MSI-X and vhost-user. no_timer_check: on a busy machine
// the kernel sees too few interrupts of the emulated timer in the time that it allows, and gives up (Documentation/admin-guide/kernel-parameters.txt).
func qemuArgs(image Image, cfg VMConfig, qmp, agent string) []string {
	pairs, memory := max(cfg.QueuePairs, 1), cmp.Or(cfg.MemoryMiB, 512)
	accel := os.Getenv("VHOSTD_ACCEL")
	if accel == "" {
		accel = "tcg"
	}
	size := fmt.Sprint(memory)
	if cfg.SlotsMiB > 0 {
		size += fmt.Sprintf(",slots=16,maxmem=%dM", memory+cfg.SlotsMiB)
	}
	share := "on"
	if cfg.Private {
		share = "off"
	}
	device := fmt.Sprintf("virtio-net-pci,netdev=n0,mac=%s,vectors=0,romfile=", cmp.Or(cfg.MAC, GuestMAC))
	if pairs > 1 {
		device += ",mq=on"
	}
	if cfg.Device != "" {
		device += "," + cfg.Device
	}
	machine, kernel := "q35,accel="+accel, "console=ttyS0 quiet panic=-1 random.trust_cpu=on no_timer_check"
	if cfg.IOMMU {
		machine += ",kernel-irqchip=split"
		kernel += " intel_iommu=on"
		device += ",iommu_platform=on,ats=on,disable-legacy=on,bus=rp0" // QEMU gives ATS to devices behind a port only
	}
	args := []string{
		"-no-user-config", "-nodefaults", "-display", "none", "-M", machine, "-m", size, "-smp", fmt.Sprint(max(cfg.CPUs, 1)),
		"-kernel", image.Kernel, "-initrd", image.Initrd, "-append", kernel,
		"-serial", "stdio", "-qmp", "unix:" + qmp + ",server=on,wait=off",
		"-device", "virtio-serial-pci", "-chardev", "socket,id=agent,path=" + agent + ",server=on,wait=off",
		"-device", "virtserialport,chardev=agent,name=" + guest.Port,
	}
	if len(cfg.Run) > 0 {
		return args
	}
	args = append(args, "-object", fmt.Sprintf("memory-backend-memfd,id=m0,size=%dM,share=%s", memory, share), "-numa", "node,memdev=m0")
	if cfg.IOMMU {
		args = append(args, "-device", "intel-iommu,device-iotlb=on", // before the devices behind it
			"-device", "pcie-root-port,id=rp0,chassis=1,slot=1")
	}
	args = append(args, netdevArgs(cfg, pairs)...)
	args = append(args, "-device", device)
	if cfg.Paused {
		args = append(args, "-S")
	}
	if cfg.Incoming != "" {
		args = append(args, "-incoming", cfg.Incoming)
	}
	return args
}

func netdevArgs(cfg VMConfig, pairs int) []string {
	if cfg.Netdev != "" {
		return []string{"-netdev", cfg.Netdev}
	}
	side := "reconnect=1"
	if cfg.Listen {
		side = "server=on,wait=off"
	}
	return []string{
		"-chardev", fmt.Sprintf("socket,id=c0,path=%s,%s", cfg.Socket, side),
		"-netdev", fmt.Sprintf("vhost-user,id=n0,chardev=c0,queues=%d", pairs),
	}
}

// Boot waits until the guest's agent is ready. Missing modules are an error.
func (vm *VM) Boot() (guest.Event, error) {
	event, err := vm.Agent.WaitReady(bootTimeout)
	if err != nil {
		return event, fmt.Errorf("%w; console:\n%s", err, lastLines(vm.Output(), 40))
	}
	if event.Missing != "" {
		return event, fmt.Errorf("guest modules: %s", event.Missing)
	}
	return event, nil
}

// SetUp gives the guest's interface an address and sets it up.
func (vm *VM) SetUp(cidr string) (guest.Link, error) {
	up := true
	return vm.Link(guest.LinkArgs{Name: "eth0", Up: &up, CIDR: cidr})
}

// Link changes and describes an interface of the guest.
func (vm *VM) Link(args guest.LinkArgs) (link guest.Link, err error) {
	err = vm.Agent.Call(guest.CommandLink, args, &link, callTimeout)
	return link, err
}

// Plug adds a memory device of the given size, shared as vhost-user needs it.
func (vm *VM) Plug(id string, mebibytes int) error {
	object := map[string]any{"qom-type": "memory-backend-memfd", "id": "mem-" + id, "size": int64(mebibytes) << 20, "share": true}
	if err := vm.QMP.Execute("object-add", object, nil, callTimeout); err != nil {
		return err
	}
	return vm.QMP.Execute("device_add", map[string]any{"driver": "pc-dimm", "id": id, "memdev": "mem-" + id}, nil, callTimeout)
}

// Unplug takes a memory device away and returns when the guest has let go of it. The guest must not have put its blocks online.
func (vm *VM) Unplug(id string) error {
	if err := vm.QMP.Execute("device_del", map[string]any{"id": id}, nil, callTimeout); err != nil {
		return err
	}
	for end := time.Now().Add(callTimeout); ; time.Sleep(20 * time.Millisecond) {
		// QEMU refuses for as long as the device is in the machine.
		err := vm.QMP.Execute("object-del", map[string]any{"id": "mem-" + id}, nil, callTimeout)
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// Quit ends QEMU in order.
func (vm *VM) Quit() error {
	if !vm.Ended() {
		// QEMU may close the connection before its answer is read.
		_ = vm.QMP.Execute("quit", nil, nil, callTimeout)
	}
	err := vm.Wait(callTimeout)
	vm.Close()
	return err
}

// Close ends QEMU at once, if it still runs, and closes the connections.
func (vm *VM) Close() {
	vm.Kill()
	if vm.Agent != nil {
		vm.Agent.Close()
	}
	if vm.QMP != nil {
		vm.QMP.Close()
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
