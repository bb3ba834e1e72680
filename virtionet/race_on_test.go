//go:build race

package virtionet

const raceBuild = true
