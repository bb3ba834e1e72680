package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newMan writes the manual pages, for who builds a package or installs the program by hand.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages into a directory",
		Long: `Write the manual pages (section 8) into a directory, which is made if it is not there, such as
/usr/local/share/man/man8.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("man: give one directory, not %d: vhostd man DIR", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return failure{err}
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			for _, c := range root.Commands() {
				c.Long = preformatted(c.Long)
			}
			header := &doc.GenManHeader{Section: "8", Source: "vhostd " + currentVersion().Version, Manual: "vhostd"}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return failure{err}
			}
			return nil
		},
	}
}

// preformatted makes indented lines of a help text what Markdown, which the manual pages are made from, leaves as it is.
func preformatted(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, " ") {
			continue
		}
		lines[i] = "    " + line
		if i > 0 && !strings.HasPrefix(lines[i-1], " ") {
			lines[i-1] += "\n"
		}
	}
	return strings.Join(lines, "\n")
}
