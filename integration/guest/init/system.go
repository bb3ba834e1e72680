package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

// file makes or reads a file of the guest's tmpfs, so that a write into pages that are no longer a buffer is seen.
func file(args guest.FileArgs) (guest.FileResult, error) {
	path := filepath.Join("/tmp", filepath.Base(args.Name))
	if args.Create {
		f, err := os.Create(path)
		if err != nil {
			return guest.FileResult{}, err
		}
		defer f.Close()
		if args.Seed == 0 {
			return guest.FileResult{}, writeZeros(f, args.Bytes)
		}
		result, err := guest.SendStream(f, args.Bytes, args.Seed)
		return guest.FileResult{SHA256: result.SHA256}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return guest.FileResult{}, err
	}
	defer f.Close()
	result, err := guest.ReceiveStream(f)
	return guest.FileResult{SHA256: result.SHA256}, err
}

func writeZeros(f *os.File, n int64) error {
	block := make([]byte, 1<<20)
	for ; n > 0; n -= int64(len(block)) {
		if _, err := f.Write(block); err != nil {
			return err
		}
	}
	return nil
}

// memory puts plugged blocks online and tells how much memory there is.
func memory(struct{}) (guest.Memory, error) {
	blocks, err := filepath.Glob("/sys/devices/system/memory/memory*/state")
	if err != nil {
		return guest.Memory{}, err
	}
	for _, path := range blocks {
		text, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(text)) != "offline" {
			continue
		}
		if err := os.WriteFile(path, []byte("online_kernel"), 0); err != nil {
			return guest.Memory{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	return readMeminfo()
}

func readMeminfo() (result guest.Memory, err error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return result, err
	}
	for line := range strings.Lines(string(text)) {
		var name string
		var kilobytes uint64
		if n, _ := fmt.Sscan(line, &name, &kilobytes); n != 2 {
			continue
		}
		switch name {
		case "MemTotal:":
			result.Total = kilobytes << 10
		case "MemAvailable:":
			result.Available = kilobytes << 10
		}
	}
	return result, nil
}

// power goes down a moment after its reply.
func power(args guest.PowerArgs) (struct{}, error) {
	command := unix.LINUX_REBOOT_CMD_POWER_OFF
	if args.Reboot {
		command = unix.LINUX_REBOOT_CMD_RESTART
	}
	time.AfterFunc(200*time.Millisecond, func() { fmt.Println("init: reboot:", unix.Reboot(command)) })
	return struct{}{}, nil
}
