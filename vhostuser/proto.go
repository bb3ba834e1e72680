package vhostuser

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/vhostd/vhostd/guestmem"
)

// Request is the id of a front-end message (vhost-user.rst, "Front-end message
// types").
type Request uint32

// Front-end messages; String gives the specification's spelling.
const (
	ReqGetFeatures           Request = 1
	ReqSetFeatures           Request = 2
	ReqSetOwner              Request = 3
	ReqResetOwner            Request = 4
	ReqSetMemTable           Request = 5
	ReqSetLogBase            Request = 6
	ReqSetLogFD              Request = 7
	ReqSetVringNum           Request = 8
	ReqSetVringAddr          Request = 9
	ReqSetVringBase          Request = 10
	ReqGetVringBase          Request = 11
	ReqSetVringKick          Request = 12
	ReqSetVringCall          Request = 13
	ReqSetVringErr           Request = 14
	ReqGetProtocolFeatures   Request = 15
	ReqSetProtocolFeatures   Request = 16
	ReqGetQueueNum           Request = 17
	ReqSetVringEnable        Request = 18
	ReqSendRARP              Request = 19
	ReqNetSetMTU             Request = 20
	ReqSetBackendReqFD       Request = 21
	ReqIOTLBMsg              Request = 22
	ReqSetVringEndian        Request = 23
	ReqGetConfig             Request = 24
	ReqSetConfig             Request = 25
	ReqCreateCryptoSession   Request = 26
	ReqCloseCryptoSession    Request = 27
	ReqPostcopyAdvise        Request = 28
	ReqPostcopyListen        Request = 29
	ReqPostcopyEnd           Request = 30
	ReqGetInflightFD         Request = 31
	ReqSetInflightFD         Request = 32
	ReqGPUSetSocket          Request = 33
	ReqResetDevice           Request = 34
	ReqVringKick             Request = 35
	ReqGetMaxMemSlots        Request = 36
	ReqAddMemReg             Request = 37
	ReqRemMemReg             Request = 38
	ReqSetStatus             Request = 39
	ReqGetStatus             Request = 40
	ReqGetSharedObject       Request = 41
	ReqSetDeviceStateFD      Request = 42
	ReqCheckDeviceState      Request = 43
	ReqGetShmemConfig        Request = 44
	ReqGetVringBaseSkipDrain Request = 45
)

// String returns the specification's name, or "message N" for an unknown id.
func (r Request) String() string {
	if m := lookup(r); m != nil {
		return m.name
	}
	return fmt.Sprintf("message %d", uint32(r))
}

// ProtocolFeatures is the VHOST_USER_PROTOCOL_F_* bit set.
type ProtocolFeatures uint64

// Protocol features of vhost-user.rst, "Protocol features".
const (
	ProtoMQ           ProtocolFeatures = 1 << 0
	ProtoLogShmfd     ProtocolFeatures = 1 << 1
	ProtoRARP         ProtocolFeatures = 1 << 2
	ProtoReplyAck     ProtocolFeatures = 1 << 3
	ProtoNetMTU       ProtocolFeatures = 1 << 4
	ProtoBackendReq   ProtocolFeatures = 1 << 5
	ProtoCrossEndian  ProtocolFeatures = 1 << 6
	ProtoCrypto       ProtocolFeatures = 1 << 7
	ProtoPagefault    ProtocolFeatures = 1 << 8
	ProtoConfig       ProtocolFeatures = 1 << 9
	ProtoInflight     ProtocolFeatures = 1 << 12
	ProtoResetDevice  ProtocolFeatures = 1 << 13
	ProtoInband       ProtocolFeatures = 1 << 14
	ProtoMemSlots     ProtocolFeatures = 1 << 15
	ProtoStatus       ProtocolFeatures = 1 << 16
	ProtoSharedObject ProtocolFeatures = 1 << 18
	ProtoDeviceState  ProtocolFeatures = 1 << 19
	ProtoBaseInflight ProtocolFeatures = 1 << 20
	ProtoGPAAddresses ProtocolFeatures = 1 << 21
	ProtoShmem        ProtocolFeatures = 1 << 22
	ProtoSkipDrain    ProtocolFeatures = 1 << 23
)

var protocolFeatureNames = [...]string{
	0: "MQ", 1: "LOG_SHMFD", 2: "RARP", 3: "REPLY_ACK", 4: "NET_MTU", 5: "BACKEND_REQ",
	6: "CROSS_ENDIAN", 7: "CRYPTO_SESSION", 8: "PAGEFAULT", 9: "CONFIG", 10: "BACKEND_SEND_FD",
	11: "HOST_NOTIFIER", 12: "INFLIGHT_SHMFD", 13: "RESET_DEVICE", 14: "INBAND_NOTIFICATIONS",
	15: "CONFIGURE_MEM_SLOTS", 16: "STATUS", 17: "XEN_MMAP", 18: "SHARED_OBJECT",
	19: "DEVICE_STATE", 20: "GET_VRING_BASE_INFLIGHT", 21: "GPA_ADDRESSES", 22: "SHMEM",
	23: "GET_VRING_BASE_SKIP_DRAIN",
}

// Names lists the bits that are set by name, "bitN" where the name is unknown.
func (p ProtocolFeatures) Names() []string {
	var names []string
	for bit := range 64 {
		if p&(1<<bit) == 0 {
			continue
		}
		if bit < len(protocolFeatureNames) {
			names = append(names, protocolFeatureNames[bit])
		} else {
			names = append(names, fmt.Sprintf("bit%d", bit))
		}
	}
	return names
}

// String joins Names with "|".
func (p ProtocolFeatures) String() string { return strings.Join(p.Names(), "|") }

// Header flags (vhost-user.rst, "Header").
const (
	FlagVersion   = 0x1
	FlagReply     = 0x4
	FlagNeedReply = 0x8
	flagVersions  = 0x3
	flagsKnown    = flagVersions | FlagReply | FlagNeedReply
	replyFlags    = FlagVersion | FlagReply
)

const (
	// HeaderLen is the size of a message header.
	HeaderLen = 12
	// MaxPayload is the largest payload that a header may announce: the largest
	// known one is a config message with a 4 KiB window (rust-vmm/vhost).
	MaxPayload = 12 + 4096
	// VringNoFD is the bit of a vring descriptor payload that says that no
	// descriptor is attached.
	VringNoFD = 1 << 8

	vringIndexMask = 0xff
	regionLen      = 32
	memRegLen      = 8 + regionLen
	configHdrLen   = 12
	// maxConfig is VHOST_USER_MAX_CONFIG_SIZE of QEMU.
	maxConfig = 256
)

// Header is a message header.
type Header struct {
	Request Request
	Flags   uint32
	Size    uint32
}

// Append appends the encoded header to b. The wire order is the host's, which is
// little endian on every platform that this package supports.
func (h Header) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(h.Request))
	b = binary.LittleEndian.AppendUint32(b, h.Flags)
	return binary.LittleEndian.AppendUint32(b, h.Size)
}

// DecodeHeader decodes the first HeaderLen bytes of b.
func DecodeHeader(b []byte) Header {
	return Header{
		Request: Request(binary.LittleEndian.Uint32(b)),
		Flags:   binary.LittleEndian.Uint32(b[4:]),
		Size:    binary.LittleEndian.Uint32(b[8:]),
	}
}

// VringState is the payload of SET_VRING_NUM, BASE, ENABLE and GET_VRING_BASE.
type VringState struct{ Index, Num uint32 }

// Append appends the encoded payload to b.
func (v VringState) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, v.Index)
	return binary.LittleEndian.AppendUint32(b, v.Num)
}

// DecodeVringState decodes the first 8 bytes of b.
func DecodeVringState(b []byte) VringState {
	return VringState{Index: binary.LittleEndian.Uint32(b), Num: binary.LittleEndian.Uint32(b[4:])}
}

// VringAddr is the payload of SET_VRING_ADDR; Desc, Used and Avail are front-end
// virtual addresses, guest physical ones with ProtoGPAAddresses. Log is the guest physical address of the used ring.
type VringAddr struct {
	Index, Flags           uint32
	Desc, Used, Avail, Log uint64
}

const (
	vringAddrLen  = 40
	vringAddrFLog = 1 << 0
)

// Append appends the encoded payload to b.
func (v VringAddr) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, v.Index)
	b = binary.LittleEndian.AppendUint32(b, v.Flags)
	for _, w := range [...]uint64{v.Desc, v.Used, v.Avail, v.Log} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

func decodeVringAddr(b []byte) VringAddr {
	return VringAddr{
		Index: binary.LittleEndian.Uint32(b),
		Flags: binary.LittleEndian.Uint32(b[4:]),
		Desc:  binary.LittleEndian.Uint64(b[8:]),
		Used:  binary.LittleEndian.Uint64(b[16:]),
		Avail: binary.LittleEndian.Uint64(b[24:]),
		Log:   binary.LittleEndian.Uint64(b[32:]),
	}
}

// AppendMemTable appends the encoded payload of SET_MEM_TABLE to b.
func AppendMemTable(b []byte, specs []guestmem.RegionSpec) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(specs)))
	b = binary.LittleEndian.AppendUint32(b, 0)
	for _, s := range specs {
		b = appendRegion(b, s)
	}
	return b
}

// AppendMemReg appends the encoded payload of ADD_MEM_REG and REM_MEM_REG to b.
func AppendMemReg(b []byte, s guestmem.RegionSpec) []byte {
	return appendRegion(binary.LittleEndian.AppendUint64(b, 0), s)
}

func appendRegion(b []byte, s guestmem.RegionSpec) []byte {
	for _, w := range [...]uint64{s.GPA, s.Size, s.UVA, s.MmapOffset} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// decodeMemReg decodes a payload of memRegLen bytes.
func decodeMemReg(b []byte) guestmem.RegionSpec { return decodeRegion(b[8:]) }

func decodeRegion(b []byte) guestmem.RegionSpec {
	return guestmem.RegionSpec{
		GPA:        binary.LittleEndian.Uint64(b),
		Size:       binary.LittleEndian.Uint64(b[8:]),
		UVA:        binary.LittleEndian.Uint64(b[16:]),
		MmapOffset: binary.LittleEndian.Uint64(b[24:]),
	}
}

// decodeMemTable decodes a payload of at least 8 bytes. The count must agree with
// the payload's size, which the caller bounded.
func decodeMemTable(b []byte) ([]guestmem.RegionSpec, error) {
	n := uint64(binary.LittleEndian.Uint32(b))
	if body := uint64(len(b) - 8); n*regionLen != body {
		return nil, fmt.Errorf("table announces %d regions of %d bytes, the payload holds %d bytes of regions", n, regionLen, body)
	}
	specs := make([]guestmem.RegionSpec, n)
	for i := range specs {
		specs[i] = decodeRegion(b[8+i*regionLen:])
	}
	return specs, nil
}

// ConfigSpace is the fixed part of a GET_CONFIG or SET_CONFIG payload.
type ConfigSpace struct{ Offset, Size, Flags uint32 }

// Append appends the encoded fixed part to b; the bytes of the space follow it.
func (c ConfigSpace) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, c.Offset)
	b = binary.LittleEndian.AppendUint32(b, c.Size)
	return binary.LittleEndian.AppendUint32(b, c.Flags)
}

func decodeConfigSpace(b []byte) ConfigSpace {
	return ConfigSpace{
		Offset: binary.LittleEndian.Uint32(b),
		Size:   binary.LittleEndian.Uint32(b[4:]),
		Flags:  binary.LittleEndian.Uint32(b[8:]),
	}
}
