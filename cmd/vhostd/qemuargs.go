package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/vhostd/vhostd/internal/qemu"
)

const qemuArgsHelp = `Print the options that connect a QEMU guest to a vhostd serve with the same flags: shared memory, the
character device of the socket, the network back-end and a virtio network card. They are one line for
a shell (use eval where a path has spaces), or an array with --json. Nothing is started.

The memory's size is that of --memory; the guest needs no -m then. Without --queue-pairs the card has one
queue pair. With --accel tcg it does without MSI-X: QEMU 7.2 crashes when it emulates the processor and the
guest uses MSI-X with vhost-user.`

const qemuArgsExample = `  vhostd serve --socket /run/vhostd/vm1.sock &
  qemu-system-x86_64 -accel kvm $(vhostd qemu-args --socket /run/vhostd/vm1.sock --memory 1G) disk.img`

func newQEMUArgs() *cobra.Command {
	s := newServeFlags()
	var memory, accel string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "qemu-args --socket PATH [flags of serve]",
		Short:   "Print the options that connect a QEMU guest",
		Long:    qemuArgsHelp,
		Example: qemuArgsExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if accel != "kvm" && accel != "tcg" {
				return fmt.Errorf("--accel: %q: accepted are kvm and tcg", accel)
			}
			words, err := qemu.Memory(memory)
			if err != nil {
				return fmt.Errorf("--memory: %w", err)
			}
			device, err := s.device(1)
			if err != nil {
				return err
			}
			device.Emulated = accel == "tcg"
			words = append(words, device.Args()...)
			if asJSON {
				return asFailure(json.NewEncoder(cmd.OutOrStdout()).Encode(words))
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), qemu.Quote(words))
			return asFailure(err)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&memory, "memory", "1G", "`SIZE` of the guest's memory")
	f.StringVar(&accel, "accel", "kvm", "what runs the guest's processors: `kvm|tcg`")
	f.BoolVar(&asJSON, "json", false, "print an array of strings as JSON (default off)")
	f.AddFlagSet(s.ofGuest)
	f.AddFlagSet(s.ofProcess)
	complete(cmd)
	return cmd
}

// device judges the flags and describes the network card for them. Without --queue-pairs it has the given number of pairs, if that many
// are offered.
func (s *serveFlags) device(pairs int) (qemu.Device, error) {
	if s.guest.Socket == "" {
		return qemu.Device{}, errors.New("--socket is missing, such as --socket /run/vhostd/vm1.sock")
	}
	guest, err := s.guest.Parse()
	if err != nil {
		return qemu.Device{}, err
	}
	if _, err := s.process.Parse(); err != nil {
		return qemu.Device{}, err
	}
	if !s.ofGuest.Changed("queue-pairs") {
		guest.QueuePairs = min(guest.QueuePairs, pairs)
	}
	return qemu.Device{
		Socket: guest.Socket, Listen: guest.Client, QueuePairs: guest.QueuePairs, MAC: strings.ToLower(s.guest.MAC), MTU: guest.MTU,
	}, nil
}
