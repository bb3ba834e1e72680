package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/vhostd/vhostd/internal/config"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Work with configuration files",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return fmt.Errorf("config: give a command: vhostd config check FILE")
		},
	}
	cmd.AddCommand(&cobra.Command{
		Use:   "check FILE",
		Short: "Judge a configuration file without starting anything",
		Long: `Judge a configuration file without starting anything. Prints "ok", or the first mistake as
FILE:LINE:COLUMN: REASON with exit status 2.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("config check: give one file, not %d: vhostd config check FILE", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := config.ReadFile(args[0]); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return nil
		},
	})
	return cmd
}
