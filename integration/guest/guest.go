// Package guest is what a test guest's agent and its host share: the commands, and the traffic that both ends make.
//
// The agent (integration/guest/init) is the guest's init. It talks JSON lines over a virtio-serial port: one Request a line
// towards the guest, one Reply a line back, matched by ID. Commands run concurrently. A Reply without ID is an Event.
package guest

import (
	"encoding/json"
	"time"
)

// Port is the name of the virtio-serial port.
const Port = "vhostd.agent"

// Request is one command to the agent; Args is the command's own Args type.
type Request struct {
	ID      uint64          `json:"id"`
	Command string          `json:"command"`
	Args    json.RawMessage `json:"args,omitempty"`
}

// Reply answers the request of the same ID. Error is empty on success.
type Reply struct {
	ID     uint64          `json:"id,omitempty"`
	Error  string          `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Event  *Event          `json:"event,omitempty"`
}

// Event is sent once when the agent is ready, after every boot.
type Event struct {
	Kernel  string  `json:"kernel"`
	Uptime  float64 `json:"uptime"`            // seconds since the kernel started
	Missing string  `json:"missing,omitempty"` // modules that did not load, with the reason
}

// Commands.
const (
	CommandLink     = "link"     // LinkArgs -> Link
	CommandAddress  = "address"  // AddressArgs -> Addresses
	CommandPing     = "ping"     // PingArgs -> PingResult
	CommandStream   = "stream"   // StreamArgs -> StreamResult
	CommandServe    = "serve"    // ServeArgs -> StreamResult
	CommandEcho     = "echo"     // EchoArgs -> EchoResult
	CommandFlood    = "flood"    // FloodArgs -> FloodResult
	CommandSink     = "sink"     // SinkArgs -> SinkResult
	CommandCalm     = "calm"     // nothing -> nothing; floods, sinks and sent streams that are under way end now
	CommandChannels = "channels" // ChannelsArgs -> Channels
	CommandOffloads = "offloads" // OffloadsArgs -> nothing
	CommandDriver   = "driver"   // DriverArgs -> nothing
	CommandFile     = "file"     // FileArgs -> FileResult
	CommandMemory   = "memory"   // nothing -> Memory
	CommandPower    = "power"    // PowerArgs -> nothing; the guest goes down after the reply
	CommandDHCP     = "dhcp"     // DHCPArgs -> Lease
	CommandResolve  = "resolve"  // ResolveArgs -> ResolveResult
	CommandFetch    = "fetch"    // FetchArgs -> FetchResult
	CommandConnect  = "connect"  // ConnectArgs -> ConnectResult
	CommandDialog   = "dialog"   // DialogArgs -> DialogResult
	CommandTrips    = "trips"    // TripsArgs -> TripsResult
	CommandSizes    = "sizes"    // SizesArgs -> SizesResult
	CommandListen   = "listen"   // ListenArgs -> nothing; the services last as long as the guest
	CommandLoss     = "loss"     // LossArgs -> nothing
)

// DHCPArgs asks for an address by DHCPv4 (RFC 2131) for an interface that is up, and puts everything that is told into force: address,
// default route, MTU and resolver.
type DHCPArgs struct {
	Name    string        `json:"name"`
	Timeout time.Duration `json:"timeout"`
}

// Lease is what a DHCP server told.
type Lease struct {
	CIDR    string        `json:"cidr"`
	Gateway string        `json:"gateway"`
	DNS     []string      `json:"dns"`
	Search  []string      `json:"search"`
	MTU     int           `json:"mtu"` // 0: none was told
	For     time.Duration `json:"for"`
}

// LinkArgs changes an interface; zero fields change nothing.
type LinkArgs struct {
	Name string `json:"name"`
	Up   *bool  `json:"up,omitempty"`
	MTU  int    `json:"mtu,omitempty"`
	CIDR string `json:"cidr,omitempty"` // replaces the interface's IPv4 addresses
	MAC  string `json:"mac,omitempty"`
	VLAN int    `json:"vlan,omitempty"` // makes the interface Name.VLAN first, which everything else is about
}

// AddressArgs adds an IPv6 address to an interface or removes one; without one it only reads.
type AddressArgs struct {
	Name   string `json:"name"`
	CIDR   string `json:"cidr,omitempty"`
	Remove bool   `json:"remove,omitempty"`
}

// Addresses are the IPv6 addresses of an interface with what became of duplicate address detection.
type Addresses []Address

// Address is one of them.
type Address struct {
	CIDR      string `json:"cidr"`
	Tentative bool   `json:"tentative"` // not found to be unique yet
	Failed    bool   `json:"failed"`    // another station has it
}

// Link describes an interface of the guest.
type Link struct {
	Name     string            `json:"name"`
	MAC      string            `json:"mac"`
	MTU      int               `json:"mtu"`
	Up       bool              `json:"up"`
	Carrier  bool              `json:"carrier"`
	Features string            `json:"features"` // of the virtio device: one character 0 or 1 a bit, bit 0 first
	Counters map[string]uint64 `json:"counters"` // /sys/class/net/NAME/statistics
}

// HasFeature says whether the guest's driver acknowledged the feature bit.
func (l Link) HasFeature(bit int) bool {
	return bit < len(l.Features) && l.Features[bit] == '1'
}

// ChannelsArgs sets the number of combined channels (ethtool -L); 0 only reads.
type ChannelsArgs struct {
	Name     string `json:"name"`
	Combined int    `json:"combined,omitempty"`
}

// Channels is the number of combined channels in use and possible (ethtool -l).
type Channels struct {
	Combined int `json:"combined"`
	Max      int `json:"max"`
}

// LossArgs has an interface lose a share of its frames, in each direction. 0 ends it.
type LossArgs struct {
	Name    string  `json:"name"`
	Percent float32 `json:"percent"`
}

// OffloadsArgs switches checksum, scatter-gather, segmentation and receive offloads together (ethtool -K).
type OffloadsArgs struct {
	Name string `json:"name"`
	On   bool   `json:"on"`
}

// DriverArgs binds or unbinds the virtio_net driver of the first network device.
type DriverArgs struct {
	Bind bool `json:"bind"`
}

// FileArgs makes a file in tmpfs (Create), or reads it back. Seed 0 makes zeros, to use up memory quickly; others pseudo-random bytes.
type FileArgs struct {
	Name   string `json:"name"`
	Create bool   `json:"create,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	Seed   uint64 `json:"seed,omitempty"`
}

// FileResult is the digest of a file's bytes.
type FileResult struct {
	SHA256 string `json:"sha256"`
}

// Memory is the guest's view of its memory in bytes; blocks that were plugged in have been put online.
type Memory struct {
	Total     uint64 `json:"total"`
	Available uint64 `json:"available"`
}

// PowerArgs asks for power off or reboot.
type PowerArgs struct {
	Reboot bool `json:"reboot,omitempty"`
}

// Rate is bytes over a duration in Mbit/s.
func Rate(bytes int64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(bytes) * 8 / d.Seconds() / 1e6
}
