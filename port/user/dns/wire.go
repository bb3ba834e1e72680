package dns

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"

	mdns "github.com/miekg/dns"
)

const (
	headerLen = 12
	maxName   = 255
	// Bits of the third and fourth byte of a header (RFC 1035, 4.1.1).
	flagQR     = 0x80
	flagTC     = 0x02
	flagRD     = 0x01
	opcodeMask = 0x78
	rcodeMask  = 0x0f
)

// question returns the end of the question section of a message with one question, or 0 if the message has another number of them or
// the question cannot be read. Compression is not accepted: there is nothing in front that a question could share.
func question(message []byte) (end int) {
	if len(message) < headerLen || binary.BigEndian.Uint16(message[4:]) != 1 {
		return 0
	}
	at := headerLen
	for at < len(message) && message[at] != 0 {
		if message[at] > 63 || at-headerLen > maxName {
			return 0
		}
		at += 1 + int(message[at])
	}
	end = at + 1 + 4 // the root label, type and class
	if end > len(message) || end-headerLen > maxName+4 {
		return 0
	}
	return end
}

// answers says whether message may be the answer to the question whose header and question section sent is. The identifiers have
// been compared. With exact, the name must be the same to the letter.
func answers(message, sent []byte, exact bool) bool {
	if len(message) < headerLen || message[2]&flagQR == 0 || message[2]&opcodeMask != sent[2]&opcodeMask {
		return false
	}
	if len(message) == headerLen {
		return message[3]&rcodeMask != mdns.RcodeSuccess // some refuse without repeating the question
	}
	end := question(message)
	if end != len(sent) {
		return false
	}
	if exact {
		return bytes.Equal(message[headerLen:end], sent[headerLen:])
	}
	for i := headerLen; i < end-4; i++ {
		if lower(message[i]) != lower(sent[i]) {
			return false
		}
	}
	return bytes.Equal(message[end-4:end], sent[end-4:]) // type and class
}

// lower is for bytes of names. It does not change the lengths of labels, which are below 64.
func lower(b byte) byte {
	if b >= 'A' && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// mixCase gives each letter of the question's name a random case.
func mixCase(message []byte, end int) {
	var coins [maxName + 1]byte
	rand.Read(coins[:])
	for at := headerLen; at < end-5; {
		label := message[at+1 : at+1+int(message[at])]
		for i, c := range label {
			if c := lower(c); c >= 'a' && c <= 'z' {
				label[i] = c - coins[at-headerLen+i]&1*('a'-'A')
			}
		}
		at += 1 + len(label)
	}
}

// fit shortens an answer to what a guest takes in one datagram: by compression if that suffices, else with the mark that there is
// more.
func fit(answer []byte, end, size int) []byte {
	if len(answer) <= size {
		return answer
	}
	var m mdns.Msg
	if m.Unpack(answer) == nil {
		m.Truncate(size)
		if short, err := m.Pack(); err == nil && len(short) <= size {
			return short
		}
	}
	bare := bytes.Clone(answer[:end])
	clear(bare[6:headerLen])
	bare[2] |= flagTC
	return bare
}

// failure is an answer without records: header and question of the query, with another code. A question that could not be read is
// left out.
func failure(query []byte, rcode int) []byte {
	end := max(question(query), headerLen)
	a := bytes.Clone(query[:end])
	clear(a[4:headerLen])
	if end > headerLen {
		a[5] = 1
	}
	a[2] = flagQR | a[2]&(opcodeMask|flagRD)
	a[3] = 0x80 | byte(rcode) // recursion is available
	return a
}
