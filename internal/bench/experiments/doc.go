// Package experiments holds the experiments of vhostd bench, one file each. All lists them.
package experiments
