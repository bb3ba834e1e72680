package vhostuser

import "github.com/vhostd/vhostd/guestmem"

// replyKind says what the front-end waits for after a message.
type replyKind uint8

const (
	// replyAck: a u64 if need_reply was set and REPLY_ACK acknowledged.
	replyAck replyKind = iota
	// replyOwn: always a reply with contents. If there is none to give, the
	// connection must end, because the front-end would wait for ever.
	replyOwn
	// replyStatus: always one u64, where non-zero is failure.
	replyStatus
	// replyServed: a reply if the message's protocol feature was acknowledged,
	// its contents or one u64 that means failure; else as replyAck.
	replyServed
)

// fdRule says how many descriptors come with a message.
type fdRule uint8

const (
	noFD fdRule = iota
	oneFD
	// anyFDs leaves the count to the handler.
	anyFDs
)

// row states what the dispatcher checks for one message and who handles it. A row
// without a handler is a message that is known but not served.
type row struct {
	req      Request
	name     string
	min, max uint32 // payload bytes
	fds      fdRule
	reply    replyKind
	needs    ProtocolFeatures // 0: none
	handle   func(*Session, *message) error
}

const maxMemTable = 8 + regionLen*guestmem.MaxRegions

// table lists the front-end messages of vhost-user.rst.
var table [ReqGetVringBaseSkipDrain + 1]row

func init() {
	for _, r := range []row{
		{ReqGetFeatures, "GET_FEATURES", 0, 0, noFD, replyOwn, 0, (*Session).getFeatures},
		{ReqSetFeatures, "SET_FEATURES", 8, 8, noFD, replyAck, 0, (*Session).setFeatures},
		{ReqSetOwner, "SET_OWNER", 0, 0, noFD, replyAck, 0, (*Session).setOwner},
		{ReqResetOwner, "RESET_OWNER", 0, 0, noFD, replyAck, 0, (*Session).resetOwner},
		{ReqSetMemTable, "SET_MEM_TABLE", 8, maxMemTable, anyFDs, replyAck, 0, (*Session).setMemTable},
		{ReqSetLogBase, "SET_LOG_BASE", dirtyLogLen, dirtyLogLen, oneFD, replyServed, ProtoLogShmfd, (*Session).setLogBase},
		{ReqSetLogFD, "SET_LOG_FD", 0, 0, oneFD, replyAck, 0, (*Session).setLogFD},
		{ReqSetVringNum, "SET_VRING_NUM", 8, 8, noFD, replyAck, 0, (*Session).setVringNum},
		{ReqSetVringAddr, "SET_VRING_ADDR", vringAddrLen, vringAddrLen, noFD, replyAck, 0, (*Session).setVringAddr},
		{ReqSetVringBase, "SET_VRING_BASE", 8, 8, noFD, replyAck, 0, (*Session).setVringBase},
		{ReqGetVringBase, "GET_VRING_BASE", 8, 8, noFD, replyOwn, 0, (*Session).getVringBase},
		{ReqSetVringKick, "SET_VRING_KICK", 8, 8, anyFDs, replyAck, 0, (*Session).setVringKick},
		{ReqSetVringCall, "SET_VRING_CALL", 8, 8, anyFDs, replyAck, 0, (*Session).setVringCall},
		{ReqSetVringErr, "SET_VRING_ERR", 8, 8, anyFDs, replyAck, 0, (*Session).setVringErr},
		{ReqGetProtocolFeatures, "GET_PROTOCOL_FEATURES", 0, 0, noFD, replyOwn, 0, (*Session).getProtocolFeatures},
		{ReqSetProtocolFeatures, "SET_PROTOCOL_FEATURES", 8, 8, noFD, replyAck, 0, (*Session).setProtocolFeatures},
		{ReqGetQueueNum, "GET_QUEUE_NUM", 0, 0, noFD, replyOwn, ProtoMQ, (*Session).getQueueNum},
		{ReqSetVringEnable, "SET_VRING_ENABLE", 8, 8, noFD, replyAck, 0, (*Session).setVringEnable},
		{ReqSendRARP, "SEND_RARP", 8, 8, noFD, replyAck, ProtoRARP, (*Session).sendRARP},
		{ReqNetSetMTU, "NET_SET_MTU", 8, 8, noFD, replyAck, ProtoNetMTU, (*Session).netSetMTU},
		{ReqSetBackendReqFD, "SET_BACKEND_REQ_FD", 0, 0, oneFD, replyAck, ProtoBackendReq, (*Session).setBackendReqFD},
		{ReqIOTLBMsg, "IOTLB_MSG", iotlbLen, iotlbLen, noFD, replyStatus, 0, (*Session).iotlbMsg},
		{ReqSetVringEndian, "SET_VRING_ENDIAN", 8, 8, noFD, replyAck, 0, (*Session).setVringEndian},
		{ReqGetConfig, "GET_CONFIG", configHdrLen, MaxPayload, noFD, replyOwn, ProtoConfig, (*Session).getConfig},
		{ReqSetConfig, "SET_CONFIG", configHdrLen, MaxPayload, noFD, replyAck, ProtoConfig, (*Session).setConfig},
		{ReqCreateCryptoSession, "CREATE_CRYPTO_SESSION", 0, MaxPayload, noFD, replyOwn, ProtoCrypto, nil},
		{ReqCloseCryptoSession, "CLOSE_CRYPTO_SESSION", 8, 8, noFD, replyAck, ProtoCrypto, nil},
		{ReqPostcopyAdvise, "POSTCOPY_ADVISE", 0, 0, noFD, replyOwn, ProtoPagefault, (*Session).postcopyAdvise},
		{ReqPostcopyListen, "POSTCOPY_LISTEN", 0, 0, noFD, replyAck, ProtoPagefault, (*Session).postcopyListen},
		{ReqPostcopyEnd, "POSTCOPY_END", 0, 0, noFD, replyStatus, ProtoPagefault, (*Session).postcopyEnd},
		{ReqGetInflightFD, "GET_INFLIGHT_FD", 20, inflightLen, noFD, replyOwn, ProtoInflight, (*Session).getInflightFD},
		{ReqSetInflightFD, "SET_INFLIGHT_FD", 20, inflightLen, oneFD, replyAck, ProtoInflight, (*Session).setInflightFD},
		{ReqGPUSetSocket, "GPU_SET_SOCKET", 0, 0, oneFD, replyAck, 0, nil},
		{ReqResetDevice, "RESET_DEVICE", 0, 0, noFD, replyAck, ProtoResetDevice, (*Session).resetDevice},
		{ReqVringKick, "VRING_KICK", 8, 8, noFD, replyAck, ProtoInband, nil},
		{ReqGetMaxMemSlots, "GET_MAX_MEM_SLOTS", 0, 0, noFD, replyOwn, ProtoMemSlots, (*Session).getMaxMemSlots},
		{ReqAddMemReg, "ADD_MEM_REG", memRegLen, memRegLen, oneFD, replyAck, ProtoMemSlots, (*Session).addMemReg},
		{ReqRemMemReg, "REM_MEM_REG", memRegLen, memRegLen, anyFDs, replyAck, ProtoMemSlots, (*Session).remMemReg},
		{ReqSetStatus, "SET_STATUS", 8, 8, noFD, replyAck, ProtoStatus, (*Session).setStatus},
		{ReqGetStatus, "GET_STATUS", 0, 0, noFD, replyOwn, ProtoStatus, (*Session).getStatus},
		{ReqGetSharedObject, "GET_SHARED_OBJECT", 16, 16, noFD, replyOwn, ProtoSharedObject, nil},
		{ReqSetDeviceStateFD, "SET_DEVICE_STATE_FD", 8, 8, oneFD, replyStatus, ProtoDeviceState, (*Session).setDeviceStateFD},
		{ReqCheckDeviceState, "CHECK_DEVICE_STATE", 0, 0, noFD, replyStatus, ProtoDeviceState, (*Session).checkDeviceState},
		{ReqGetShmemConfig, "GET_SHMEM_CONFIG", 0, 0, noFD, replyOwn, ProtoShmem, nil},
		{ReqGetVringBaseSkipDrain, "GET_VRING_BASE_SKIP_DRAIN", 8, 8, noFD, replyOwn, ProtoInflight | ProtoBaseInflight | ProtoSkipDrain, (*Session).getVringBaseSkipDrain},
	} {
		table[r.req] = r
	}
}

// lookup returns nil for an unknown id.
func lookup(req Request) *row {
	if uint64(req) >= uint64(len(table)) || table[req].name == "" {
		return nil
	}
	return &table[req]
}
