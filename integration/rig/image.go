package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"

	"github.com/u-root/u-root/pkg/cpio"
)

// ErrNotSetUp means that a program or file that `make setup` brings is missing.
var ErrNotSetUp = errors.New("not set up, run `make setup`")

// modules are the guest's drivers below kernel/ in the order they are loaded (Debian's cloud kernel has none of them built in).
var modules = []string{
	"drivers/virtio/virtio_ring.ko",
	"drivers/virtio/virtio.ko",
	"drivers/virtio/virtio_pci_legacy_dev.ko",
	"drivers/virtio/virtio_pci_modern_dev.ko",
	"drivers/virtio/virtio_pci.ko",
	"drivers/char/virtio_console.ko",
	"net/core/failover.ko",
	"drivers/net/net_failover.ko",
	"drivers/net/virtio_net.ko",
	"net/llc/llc.ko",
	"net/802/stp.ko",
	"net/802/garp.ko",
	"net/802/mrp.ko",
	"net/8021q/8021q.ko",
	"net/sched/sch_netem.ko", // these and ifb: guest.CommandLoss
	"net/sched/sch_ingress.ko",
	"net/sched/cls_matchall.ko",
	"net/sched/act_mirred.ko",
	"drivers/net/ifb.ko",
}

// Image is what QEMU boots.
type Image struct{ Kernel, Initrd string }

// BuildImage compiles the guest's init and packs it with the kernel's modules into folder.
func BuildImage(folder string) (Image, error) {
	kernel, moduleFolder, err := findKernel()
	if err != nil {
		return Image{}, err
	}
	program := filepath.Join(folder, "init")
	if err := goBuild(program, "github.com/vhostd/vhostd/integration/guest/init", "CGO_ENABLED=0"); err != nil {
		return Image{}, err
	}
	image := Image{Kernel: filepath.Join(folder, "kernel"), Initrd: filepath.Join(folder, "initrd")}
	// A copy, since QEMU may run as a user who cannot read the cache.
	content, err := os.ReadFile(kernel)
	if err == nil {
		err = os.WriteFile(image.Kernel, content, 0o644)
	}
	return image, errors.Join(err, writeInitrd(image.Initrd, program, moduleFolder))
}

// findKernel returns the newest unpacked kernel and its module folder.
func findKernel() (kernel, moduleFolder string, err error) {
	cache, err := CacheFolder()
	if err != nil {
		return "", "", err
	}
	kernels, err := filepath.Glob(filepath.Join(cache, "kernel", "boot", "vmlinuz-*"))
	if err != nil || len(kernels) == 0 {
		return "", "", fmt.Errorf("no guest kernel in %s/kernel: %w", cache, ErrNotSetUp)
	}
	sort.Strings(kernels)
	kernel = kernels[len(kernels)-1]
	release := filepath.Base(kernel)[len("vmlinuz-"):]
	return kernel, filepath.Join(cache, "kernel", "lib/modules", release, "kernel"), nil
}

// CacheFolder is where `make setup` puts what it downloads.
func CacheFolder() (string, error) {
	if folder := os.Getenv("VHOSTD_CACHE"); folder != "" {
		return folder, nil
	}
	folder, err := os.UserCacheDir()
	return filepath.Join(folder, "vhostd"), err
}

func goBuild(output, pkg string, env ...string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", output, pkg)
	cmd.Env = append(os.Environ(), env...)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

// writeInitrd packs init and the modules; the modules' names start with their number in the order of loading.
func writeInitrd(path, program, moduleFolder string) error {
	records := []cpio.Record{
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.Directory("proc", 0o755), cpio.Directory("sys", 0o755), cpio.Directory("tmp", 0o755), cpio.Directory("modules", 0o755),
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	records = append(records, cpio.StaticFile("init", string(content), 0o755))
	for i, name := range modules {
		content, err := os.ReadFile(filepath.Join(moduleFolder, name))
		if err != nil {
			return fmt.Errorf("kernel module: %w", err)
		}
		records = append(records, cpio.StaticFile(fmt.Sprintf("modules/%02d-%s", i, filepath.Base(name)), string(content), 0o644))
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	writer := cpio.Newc.Writer(file)
	if err := cpio.WriteRecordsAndDirs(writer, records); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return cpio.WriteTrailer(writer)
}
