package guest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// EchoArgs describes datagrams sent to an echo server, Window of them on their way at a time.
type EchoArgs struct {
	Addr    string        `json:"addr"`
	Size    int           `json:"size"` // payload bytes, at least 8
	Count   int           `json:"count"`
	Window  int           `json:"window"`
	Timeout time.Duration `json:"timeout"` // without any answer
}

// EchoResult counts the datagrams of an Echo.
type EchoResult struct {
	Sent    int `json:"sent"`
	Echoed  int `json:"echoed"`
	Corrupt int `json:"corrupt"`
}

// FloodArgs describes datagrams sent as fast as the socket takes them, until For has passed, Count is reached (0: no limit) or the
// socket is closed. They are numbered from First on.
type FloodArgs struct {
	Addr  string        `json:"addr"`
	Size  int           `json:"size"`
	First int           `json:"first,omitempty"`
	Count int           `json:"count,omitempty"`
	For   time.Duration `json:"for"`
}

// FloodResult counts the datagrams the kernel took and refused.
type FloodResult struct {
	Sent   int `json:"sent"`
	Errors int `json:"errors"`
}

// SinkArgs describes a UDP socket that counts what comes until nothing has come for Idle, For has passed or the socket is closed.
type SinkArgs struct {
	Port int           `json:"port"`
	For  time.Duration `json:"for"`
	Idle time.Duration `json:"idle"`
}

// SinkResult counts the datagrams that came. Repeated are those that came before, Late those that came first after a higher number,
// Corrupt those whose contents do not fit their number.
type SinkResult struct {
	Received int   `json:"received"`
	Bytes    int64 `json:"bytes"`
	Repeated int   `json:"repeated"`
	Late     int   `json:"late"`
	Corrupt  int   `json:"corrupt"`
}

// Echo sends numbered datagrams over conn (connected) and compares what comes back.
func Echo(conn net.Conn, args EchoArgs) (EchoResult, error) {
	var result EchoResult
	if args.Size < 8 {
		return result, fmt.Errorf("echo: datagrams of %d bytes, at least 8 carry the number", args.Size)
	}
	if err := growBuffer(conn); err != nil {
		return result, err
	}
	answer := make([]byte, 65536)
	for result.Echoed+result.Corrupt < args.Count {
		for result.Sent < args.Count && result.Sent-result.Echoed-result.Corrupt < args.Window {
			if _, err := conn.Write(datagram(result.Sent, args.Size)); err != nil {
				return result, err
			}
			result.Sent++
		}
		if err := conn.SetReadDeadline(time.Now().Add(args.Timeout)); err != nil {
			return result, err
		}
		n, err := conn.Read(answer)
		if os.IsTimeout(err) {
			return result, nil
		}
		if err != nil {
			return result, err
		}
		if n == args.Size && bytes.Equal(answer[:n], datagram(int(binary.LittleEndian.Uint64(answer)), args.Size)) {
			result.Echoed++
		} else {
			result.Corrupt++
		}
	}
	return result, nil
}

// datagram is the payload with the given number.
func datagram(number, size int) []byte {
	payload := make([]byte, size)
	for i := 8; i < size; i++ {
		payload[i] = byte(number + i)
	}
	binary.LittleEndian.PutUint64(payload, uint64(number))
	return payload
}

// growBuffer lets a socket hold what a window brings, so that a datagram can get lost only on the way. It needs CAP_NET_ADMIN.
func growBuffer(conn any) error {
	const bytes = 8 << 20
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("%T is no socket", conn)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	if control := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes)
	}); control != nil {
		return control
	}
	return err
}

// ServeEcho returns every datagram to its sender until the socket is closed.
func ServeEcho(conn net.PacketConn) {
	if err := growBuffer(conn); err != nil {
		return
	}
	buffer := make([]byte, 65536)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return
		}
		// A lost answer is the caller's to notice.
		_, _ = conn.WriteTo(buffer[:n], from)
	}
}

// Flood sends datagrams over conn; refused ones (full queue, link down) are counted and the sender pauses briefly.
func Flood(conn net.Conn, args FloodArgs) FloodResult {
	var result FloodResult
	end := time.Now().Add(args.For)
	for (args.Count == 0 || result.Sent < args.Count) && time.Now().Before(end) {
		if _, err := conn.Write(datagram(args.First+result.Sent, max(args.Size, 8))); err != nil {
			if errors.Is(err, net.ErrClosed) {
				return result
			}
			result.Errors++
			time.Sleep(10 * time.Millisecond)
			continue
		}
		result.Sent++
	}
	return result
}

// Sink counts numbered datagrams that arrive at conn.
func Sink(conn net.Conn, args SinkArgs) SinkResult {
	var result SinkResult
	last, seen := -1, map[int]bool{}
	buffer := make([]byte, 65536)
	end := time.Now().Add(args.For)
	for {
		deadline := end
		if idle := time.Now().Add(args.Idle); result.Received > 0 && idle.Before(end) {
			deadline = idle
		}
		if err := conn.SetReadDeadline(deadline); err != nil {
			return result
		}
		n, err := conn.Read(buffer)
		if err != nil {
			return result
		}
		result.Received++
		result.Bytes += int64(n)
		result.judge(buffer[:n], &last, seen)
	}
}

func (r *SinkResult) judge(payload []byte, last *int, seen map[int]bool) {
	if len(payload) < 8 {
		r.Corrupt++
		return
	}
	number := int(binary.LittleEndian.Uint64(payload))
	switch {
	case !bytes.Equal(payload, datagram(number, len(payload))):
		r.Corrupt++
		return
	case seen[number]:
		r.Repeated++
	case number < *last:
		r.Late++
	}
	seen[number], *last = true, max(*last, number)
}
