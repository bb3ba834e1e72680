package rig

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// domain is a libvirt domain with one vhost-user interface. QEMU 7.2 under emulation needs a device without MSI-X.
const domain = `<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>vm</name>
  <memory unit='MiB'>512</memory>
  %s
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>%s</kernel>
    <initrd>%s</initrd>
    <cmdline>console=ttyS0 quiet panic=-1</cmdline>
  </os>
  <devices>
    %s
    <channel type='unix'>
      <source mode='bind' path='%s'/>
      <target type='virtio' name='vhostd.agent'/>
    </channel>
  </devices>
  <qemu:override>
    <qemu:device alias='net0'>
      <qemu:frontend>
        <qemu:property name='vectors' type='unsigned' value='0'/>
      </qemu:frontend>
    </qemu:device>
  </qemu:override>
</domain>
`

// driverConfig makes libvirt's embedded driver do without its log daemon, security driver, namespaces and control groups. QEMU runs
// as the user that Debian's packages make for it.
const driverConfig = `stdio_handler = "file"
security_driver = "none"
user = "libvirt-qemu"
group = "kvm"
remember_owner = 0
namespaces = []
cgroup_controllers = []
`

// StartLibvirt runs a guest through libvirt's QEMU driver, embedded in one process. memory and network are the elements
// <memoryBacking> and <interface> of the domain. The VM has no QMP.
func StartLibvirt(folder string, image Image, memory, network string) (*VM, error) {
	// The driver's own sockets lie four folders deeper; the path of a socket holds 107 bytes.
	root, err := os.MkdirTemp(folder, "lv")
	if err != nil {
		return nil, err
	}
	// QEMU's user needs to get through to the socket, kernel and initrd.
	for _, folder := range []string{folder, root, filepath.Dir(image.Initrd)} {
		if err := os.Chmod(folder, 0o755); err != nil {
			return nil, err
		}
	}
	agent, xml := filepath.Join(root, "agent"), filepath.Join(root, "domain.xml")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(root, "etc", "qemu.conf"), []byte(driverConfig), 0o644); err != nil {
		return nil, err
	}
	text := fmt.Sprintf(domain, memory, image.Kernel, image.Initrd, network, agent)
	if err := os.WriteFile(xml, []byte(text), 0o644); err != nil {
		return nil, err
	}
	process, err := startLibvirt(root, xml)
	if err != nil {
		return nil, err
	}
	vm := &VM{Process: process, folder: root}
	if vm.Agent, err = DialAgent(process, agent, time.Minute); err != nil {
		vm.Close()
		return nil, fmt.Errorf("libvirt: %w\n%s", err, process.Output())
	}
	return vm, nil
}

// startLibvirt runs virt-qemu-run in a pid namespace, with its own /proc because libvirt looks its QEMU up there. QEMU detaches itself
// and would survive a SIGKILL of virt-qemu-run; the kernel ends a pid namespace with its first process. That is the shell, since
// somebody has to collect detached processes.
func startLibvirt(root, xml string) (*Process, error) {
	cmd := exec.Command("sh", "-c", `mount -t proc proc /proc && virt-qemu-run --root "$0" "$1"; exit $?`, root, xml)
	return start(nil, "virt-qemu-run", cmd, syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS})
}
