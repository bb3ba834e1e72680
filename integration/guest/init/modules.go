package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// loadModules loads every file of /modules in the order of the names and returns what went wrong, for the host to see.
func loadModules() (failed string) {
	files, err := filepath.Glob("/modules/*.ko")
	if err != nil || len(files) == 0 {
		return "no modules in the image"
	}
	var failures []string
	for _, name := range files {
		if err := loadModule(name); err != nil {
			failures = append(failures, err.Error())
		}
	}
	return strings.Join(failures, "; ")
}

func loadModule(name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// openPort waits for the virtio-serial port of the given name and opens it.
func openPort(name string, wait time.Duration) (*os.File, error) {
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		ports, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, path := range ports {
			if text, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(text)) == name {
				device := filepath.Base(filepath.Dir(path))
				return os.OpenFile("/dev/"+device, os.O_RDWR, 0)
			}
		}
	}
	return nil, fmt.Errorf("no virtio-serial port %q within %v", name, wait)
}
