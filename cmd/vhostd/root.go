package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/daemon"
)

// conventionNetwork serves front-ends that start the program by the back-end program conventions,
// which cannot name a network. It is the default of serve as well.
const conventionNetwork = "user"

func newRoot() *cobra.Command {
	var socketPath string
	var fd int
	var capabilities bool
	root := &cobra.Command{
		Use:   "vhostd",
		Short: "Network back-end for virtual machines over vhost-user",
		Long: `vhostd serves virtio network devices to virtual machines over vhost-user.

Without a command it follows the vhost-user back-end program conventions: it serves
one guest on --socket-path or --fd with the network "` + conventionNetwork + `".`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if capabilities {
				return printCapabilities(cmd.OutOrStdout())
			}
			return serveConvention(cmd, socketPath, fd)
		},
	}
	root.Flags().StringVar(&socketPath, "socket-path", "", "serve one guest on this socket `PATH`")
	root.Flags().IntVar(&fd, "fd", -1, "serve one guest on this inherited socket, connected or listening (`N`)")
	root.Flags().BoolVar(&capabilities, "print-capabilities", false, "print what this back-end can do as JSON")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.AddCommand(newServe(), newRun(), newQEMUArgs(), newAttach(), newConfig(), newReload(), newStats(), newBench(), newVersion(), newMan())
	return root
}

// flagError says what a flag accepts in place of the parser's own words.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	accepted := "whole numbers"
	if f := invalid.GetFlag(); f.Value.Type() == "bool" {
		accepted = "true and false"
	}
	return fmt.Errorf("--%s: %q: accepted are %s", invalid.GetFlag().Name, invalid.GetValue(), accepted)
}

// printCapabilities prints the VHostUserBackendCapabilities of QEMU's docs/interop/vhost-user.json;
// no feature is defined for the type "net".
func printCapabilities(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Type     string   `json:"type"`
		Features []string `json:"features"`
	}{"net", []string{}})
}

func serveConvention(cmd *cobra.Command, socketPath string, fd int) error {
	flags := cmd.Flags()
	switch {
	case flags.Changed("fd") && flags.Changed("socket-path"):
		return errors.New("--socket-path and --fd exclude each other")
	case !flags.Changed("fd") && !flags.Changed("socket-path"):
		return errors.New("give a command, --socket-path, --fd or --print-capabilities: vhostd --help lists them")
	}
	guest := config.DefaultGuest()
	guest.Name, guest.Socket, guest.Network = defaultName, socketPath, conventionNetwork
	var from daemon.Source
	if flags.Changed("fd") {
		var err error
		if from, guest.Socket, err = daemon.SourceFromFD(fd); err != nil {
			return fmt.Errorf("--fd: %w", err)
		}
	}
	plan, err := newPlan(config.DefaultProcess(), []config.Guest{guest}, map[string]daemon.Source{guest.Name: from})
	if err != nil {
		return err
	}
	return plan.run(cmd.OutOrStdout())
}
