package main

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/qemu"
)

const runHelp = `Run QEMU with a network of vhostd, as one command: a vhostd serve is started for it and ends with it, and
the options that connect the two are added to QEMU's command line. The exit status is QEMU's, 128 and the
number of the signal if one ended it. SIGINT, SIGTERM and SIGHUP are passed on to QEMU.

Everything of the command line stays as it is. Added are
  -object memory-backend-memfd,share=on and -machine memory-backend=  of the size of -m, unless there is
           shared memory already
  -chardev, -netdev vhost-user and -device virtio-net-pci,netdev=vhostd0  with as many queue pairs as the
           guest has processors, eight at most, or --queue-pairs; a -device of yours with
           netdev=vhostd0 takes the place of the last one
An option that cannot stay, such as memory that is not shared, is refused with what to write instead.

The socket is in a directory that nobody else may enter and that goes at the end, or with the next start
after a kill -9, unless --socket names one. A back-end that dies is started again and the guest has its network back within a second or two; one
that dies again and again ends QEMU too. vhostd serve is confined as always (--sandbox), QEMU is
not. Without --log-level only warnings are logged.`

const runExample = `  vhostd run -- qemu-system-x86_64 -accel kvm -m 1G disk.img
  vhostd run --publish 127.0.0.1:2222:22 -- qemu-system-x86_64 -accel kvm -smp 2 -m 2G -nographic disk.img`

func newRun() *cobra.Command {
	s := newServeFlags()
	s.process.LogLevel = "warn"
	s.ofProcess = processFlags(&s.process)
	var file string
	cmd := &cobra.Command{
		Use:     "run [flags of serve] -- qemu-system-x86_64 …",
		Short:   "Run QEMU with a network",
		Long:    runHelp,
		Example: runExample,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("run: give QEMU's command line behind --, such as vhostd run -- qemu-system-x86_64 -m 1G disk.img")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if file != "" {
				return errors.New("--config names many guests and run starts one: describe it by flags, or use vhostd serve and vhostd qemu-args")
			}
			return s.runQEMU(args)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.SetInterspersed(false) // what follows QEMU's name is QEMU's
	f.AddFlagSet(s.ofGuest)
	f.AddFlagSet(s.ofProcess)
	f.StringVar(&file, "config", "", "")
	// It fails only for a flag that does not exist.
	if err := f.MarkHidden("config"); err != nil {
		panic(err)
	}
	complete(cmd)
	return cmd
}

// runQEMU judges everything, starts back-end and QEMU, and returns when both have ended.
func (s *serveFlags) runQEMU(words []string) (err error) {
	command, err := qemu.Read(words)
	if err != nil {
		return err
	}
	if _, err := exec.LookPath(words[0]); err != nil {
		return fmt.Errorf("run: %w", err)
	}
	if s.guest.Socket == "" {
		dir, err := makeRunDir()
		if err != nil {
			return failure{fmt.Errorf("run: a directory for the socket: %w", err)}
		}
		defer func() { _ = dir.remove() }() // what stays is removed by the next start
		s.guest.Socket = filepath.Join(dir.path, "vm.sock")
	}
	device, err := s.device(command.CPUs())
	if err != nil {
		return err
	}
	device.Emulated = command.Emulated()
	if words, err = command.With(device); err != nil {
		return err
	}
	return runBoth(append([]string{"serve"}, s.given()...), words)
}

// given are the flags for a vhostd serve of the same guest.
func (s *serveFlags) given() (flags []string) {
	add := func(f *pflag.Flag) {
		if !f.Changed && f.Name != "socket" && f.Name != "log-level" {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			for _, v := range list.GetSlice() {
				flags = append(flags, "--"+f.Name+"="+v)
			}
			return
		}
		flags = append(flags, "--"+f.Name+"="+f.Value.String())
	}
	s.ofGuest.VisitAll(add)
	s.ofProcess.VisitAll(add)
	return flags
}
