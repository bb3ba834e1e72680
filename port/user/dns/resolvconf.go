package dns

import (
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	mdns "github.com/miekg/dns"
)

const (
	// lookInterval is how often the file is looked at, at most: each question may.
	lookInterval = time.Second
	// maxResolvConf bounds the file in bytes.
	maxResolvConf = 64 << 10
)

// fallback is what libc asks when the file names nobody (resolv.conf(5)).
var fallback = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}

// resolvConf follows the file that names the host's resolvers, also when it is replaced by another one or a link to one. It looks at
// the file by its name when there is a question: nothing runs in between, and what goes wrong once does not stay so.
type resolvConf struct {
	mu     sync.Mutex
	path   string
	looked time.Time
	seen   fs.FileInfo
	list   []netip.AddrPort
}

// resolvers returns what the file says now. While it cannot be read, the last ones stay.
func (r *resolvConf) resolvers(path string, now time.Time) []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	if path == r.path && !r.looked.IsZero() && now.Sub(r.looked) < lookInterval {
		return r.list
	}
	if path != r.path {
		r.path, r.seen, r.list = path, nil, nil
	}
	r.looked = now
	info, err := os.Stat(path)
	// The same time is believed only once it is over: the file may change again within one tick of the file system's clock.
	if err == nil && (r.seen == nil || !os.SameFile(info, r.seen) || info.Size() != r.seen.Size() ||
		!info.ModTime().Equal(r.seen.ModTime()) || now.Sub(info.ModTime()) < 2*lookInterval) {
		if list, err := readResolvConf(path); err == nil {
			r.seen, r.list = info, list
		}
	}
	if r.list == nil {
		return fallback
	}
	return r.list
}

func readResolvConf(path string) ([]netip.AddrPort, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	config, err := mdns.ClientConfigFromReader(io.LimitReader(file, maxResolvConf))
	if err != nil {
		return nil, err
	}
	var list []netip.AddrPort
	for _, text := range config.Servers {
		addr, err := netip.ParseAddr(text)
		if at := netip.AddrPortFrom(addr, 53); err == nil && !addr.IsUnspecified() && !slices.Contains(list, at) {
			list = append(list, at)
		}
	}
	if len(list) == 0 {
		return fallback, nil
	}
	return list[:min(len(list), maxTries)], nil
}
