package virtionet

import (
	"fmt"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/port"
)

// CopyPolicy says whether frames leave the guest by cached or by non-temporal
// stores (the kernel's tx-nocache-copy).
type CopyPolicy uint8

// CopyNever always copies through the cache. CopyAuto does too unless the port says that so many bytes wait for another
// processor that they leave the cache before they are read (fragalloc.PastCache); then it is CopyAlways for pieces of
// fragalloc.AutoMin bytes. CopyAlways uses non-temporal stores behind the first 128 bytes of each piece of 256 bytes or more.
const (
	CopyNever CopyPolicy = iota
	CopyAuto
	CopyAlways
)

var copyPolicyNames = [...]string{CopyNever: "never", CopyAuto: "auto", CopyAlways: "always"}

// String returns the name that [ParseCopyPolicy] accepts.
func (c CopyPolicy) String() string {
	if int(c) < len(copyPolicyNames) {
		return copyPolicyNames[c]
	}
	return fmt.Sprintf("CopyPolicy(%d)", uint8(c))
}

// ParseCopyPolicy turns "never", "auto" or "always" into a CopyPolicy.
func ParseCopyPolicy(s string) (CopyPolicy, error) {
	for c, name := range copyPolicyNames {
		if s == name {
			return CopyPolicy(c), nil
		}
	}
	return CopyNever, fmt.Errorf("copy policy %q: accepted are never, auto and always", s)
}

// cachedOnly is the shortest copy past the cache if there shall be none.
const cachedOnly = 0

// setCopy changes the policy between two batches.
func (p *pair) setCopy(policy CopyPolicy) {
	p.holder, p.pastMin = nil, cachedOnly
	switch policy {
	case CopyAlways:
		p.pastMin = fragalloc.NoCacheMin
	case CopyAuto:
		p.holder, _ = p.queue.(port.Holder)
	}
}

// chooseCopy decides for the next batch what CopyAuto leaves open.
func (p *pair) chooseCopy() {
	p.pastMin = cachedOnly
	if fragalloc.PastCache(p.holder.Held()) {
		p.pastMin = fragalloc.AutoMin
	}
}

// SetCopy changes the copy policy, also while rings run, and returns when all workers follow it. It is safe from any goroutine.
func (d *Device) SetCopy(policy CopyPolicy) {
	d.control.Lock()
	defer d.control.Unlock()
	d.mu.Lock()
	d.copyPolicy = policy
	d.mu.Unlock()
	for _, p := range d.pairs {
		if p != nil {
			p.loop.Do(func() { p.setCopy(policy) })
		}
	}
}

func (d *Device) copying() CopyPolicy {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.copyPolicy
}
