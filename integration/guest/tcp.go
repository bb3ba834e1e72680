package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ConnectArgs describes TCP connections that are opened at the same time and stay open until the last one is decided. With Echo the
// server must return a greeting's line (see ServeStreams) and some bytes over each; otherwise a connection counts when it is made.
type ConnectArgs struct {
	Addr    string        `json:"addr"`
	Count   int           `json:"count,omitempty"` // 0 means 1
	Echo    bool          `json:"echo,omitempty"`
	Timeout time.Duration `json:"timeout"`
}

// ConnectResult counts the connections by their outcome: Connected and so on, or the text of any other error.
type ConnectResult struct {
	Outcomes map[string]int `json:"outcomes"`
	Took     time.Duration  `json:"took"` // until all were decided
}

// Outcomes of a connection.
const (
	Connected   = "connected"
	Refused     = "refused"
	Unreachable = "unreachable"
	Prohibited  = "prohibited"
	TimedOut    = "timed out"
)

// DialogArgs describes a connection on which one side sends everything and closes its direction, and then the other one does.
type DialogArgs struct {
	Addr    string        `json:"addr"`
	First   bool          `json:"first"` // this side sends first
	Bytes   int64         `json:"bytes"`
	Seed    uint64        `json:"seed"`
	Timeout time.Duration `json:"timeout"`
}

// DialogResult is what one side of a dialog saw.
type DialogResult struct {
	Sent     StreamResult `json:"sent"`
	Received StreamResult `json:"received"`
}

// TripsArgs describes requests of a few bytes to an echo service, one after the other on one connection.
type TripsArgs struct {
	Addr    string        `json:"addr"`
	Count   int           `json:"count"`
	Size    int           `json:"size"`
	Timeout time.Duration `json:"timeout"` // for the whole
}

// TripsResult are the times from request to answer.
type TripsResult struct {
	Count   int           `json:"count"`
	Median  time.Duration `json:"median"`
	P99     time.Duration `json:"p99"`
	Longest time.Duration `json:"longest"`
}

// ListenArgs describes echo services for TCP and UDP on a port.
type ListenArgs struct {
	Port int `json:"port"`
}

// Connect opens the connections and tells what became of them.
func Connect(args ConnectArgs) ConnectResult {
	count := max(args.Count, 1)
	outcomes := make(chan string, count)
	decided := make(chan struct{})
	var all sync.WaitGroup
	start := time.Now()
	for i := range count {
		all.Go(func() {
			conn, err := net.DialTimeout("tcp", args.Addr, args.Timeout)
			if err == nil {
				defer conn.Close()
				if args.Echo {
					err = echoOnce(conn, i, start.Add(args.Timeout))
				}
			}
			outcomes <- Outcome(err)
			<-decided
		})
	}
	result := ConnectResult{Outcomes: map[string]int{}}
	for range count {
		result.Outcomes[<-outcomes]++
	}
	result.Took = time.Since(start)
	close(decided)
	all.Wait()
	return result
}

// Outcome names the outcome of a connect.
func Outcome(err error) string {
	switch {
	case err == nil:
		return Connected
	case errors.Is(err, unix.ECONNREFUSED):
		return Refused
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return Unreachable
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return Prohibited
	case os.IsTimeout(err), errors.Is(err, unix.ETIMEDOUT):
		return TimedOut
	}
	return err.Error()
}

// echoOnce reads the greeting of an echo service and has some bytes returned.
func echoOnce(conn net.Conn, number int, deadline time.Time) error {
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := ReadLine(conn); err != nil {
		return err
	}
	sent := datagram(number, 64)
	if _, err := conn.Write(sent); err != nil {
		return err
	}
	back := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, back); err != nil {
		return err
	}
	if !bytes.Equal(sent, back) {
		return errors.New("other bytes came back")
	}
	return nil
}

// ReadLine reads up to the end of a line and not further.
func ReadLine(r io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; line = append(line, b[0]) {
		if _, err := io.ReadFull(r, b); err != nil {
			return string(line), err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
	}
}

// ServeStreams greets each client with a line, which ends with the client's address, and returns its bytes to it until it closes its
// direction.
func ServeStreams(listener net.Listener, greeting string) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			if _, err := fmt.Fprintf(conn, "%s %s\n", greeting, conn.RemoteAddr()); err != nil {
				return
			}
			// What breaks is the client's to notice.
			_, _ = io.Copy(struct{ io.Writer }{conn}, struct{ io.Reader }{conn})
		}()
	}
}

// Dialog is one side of a dialog; the other one has First the other way round.
func Dialog(conn *net.TCPConn, args DialogArgs) (result DialogResult, err error) {
	if err := conn.SetDeadline(time.Now().Add(args.Timeout)); err != nil {
		return result, err
	}
	send := func() (err error) {
		if result.Sent, err = SendStream(conn, args.Bytes, args.Seed); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		return conn.CloseWrite()
	}
	receive := func() (err error) {
		if result.Received, err = ReceiveStream(conn); err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		return nil
	}
	first, second := receive, send
	if args.First {
		first, second = send, receive
	}
	err = first()
	if err == nil {
		err = second()
	}
	return result, err
}

// Trips measures how long an echo service takes to answer.
func Trips(conn net.Conn, args TripsArgs) (result TripsResult, err error) {
	if err := conn.SetDeadline(time.Now().Add(args.Timeout)); err != nil {
		return result, err
	}
	if _, err := ReadLine(conn); err != nil {
		return result, err
	}
	sent, back := make([]byte, args.Size), make([]byte, args.Size)
	var took []time.Duration
	for range args.Count {
		start := time.Now()
		if _, err := conn.Write(sent); err != nil {
			return result, err
		}
		if _, err := io.ReadFull(conn, back); err != nil {
			return result, err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	n := len(took)
	if n == 0 {
		return result, errors.New("trips: none were wanted")
	}
	return TripsResult{Count: n, Median: took[n/2], P99: took[n*99/100], Longest: took[n-1]}, nil
}
