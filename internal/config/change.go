package config

import (
	"errors"

	"github.com/vhostd/vhostd/virtionet"
)

// Change is what may be different about a guest from now on, as written, while it is served. A key that is left out stays as it
// is. Parse judges it.
type Change struct {
	TxAlloc *string `json:"tx-alloc"`
	Copy    *string `json:"copy"`
}

// ChangeSpec is a Change after Parse; nil stays as it is.
type ChangeSpec struct {
	TxAlloc *virtionet.TxAlloc
	Copy    *virtionet.CopyPolicy
}

// Parse checks every key and returns the usable form. An error about a key is a *KeyError.
func (c Change) Parse() (ChangeSpec, error) {
	var spec ChangeSpec
	if c.TxAlloc == nil && c.Copy == nil {
		return spec, errors.New("nothing is changed: accepted are tx-alloc and copy")
	}
	if c.TxAlloc != nil {
		a, err := virtionet.ParseTxAlloc(*c.TxAlloc)
		if err != nil {
			return spec, &KeyError{Key: "tx-alloc", Err: err}
		}
		spec.TxAlloc = &a
	}
	if c.Copy != nil {
		p, err := virtionet.ParseCopyPolicy(*c.Copy)
		if err != nil {
			return spec, &KeyError{Key: "copy", Err: err}
		}
		spec.Copy = &p
	}
	return spec, nil
}
