// Package layercheck has no code of its own: its test enforces the direction of imports and the rules for unsafe code.
// Both are described in docs/design.md.
package layercheck
