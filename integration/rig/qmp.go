package rig

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"time"
)

// QMP is a connection to QEMU's machine protocol. Calls may come from several goroutines; events are ignored.
type QMP struct {
	conn    net.Conn
	mutex   sync.Mutex // one command at a time
	answers chan qmpMessage
}

type qmpMessage struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class       string `json:"class"`
		Description string `json:"desc"`
	} `json:"error"`
	Event    string          `json:"event"`
	Greeting json.RawMessage `json:"QMP"`
}

// DialQMP connects and leaves the negotiation mode; the machine is complete when it returns.
func DialQMP(process *Process, path string, timeout time.Duration) (*QMP, error) {
	conn, err := dialUnix(process, path, timeout)
	if err != nil {
		return nil, err
	}
	q := &QMP{conn: conn, answers: make(chan qmpMessage, 1)}
	go q.read()
	if err := q.Execute("qmp_capabilities", nil, nil, timeout); err != nil {
		conn.Close()
		return nil, err
	}
	return q, nil
}

// dialUnix waits for the socket of a process that has just been started.
func dialUnix(process *Process, path string, timeout time.Duration) (net.Conn, error) {
	for end := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("unix", path)
		if err == nil || process.Ended() || time.Now().After(end) {
			return conn, err
		}
	}
}

func (q *QMP) read() {
	defer close(q.answers)
	reader := bufio.NewReader(q.conn)
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			return
		}
		var message qmpMessage
		if err := json.Unmarshal(line, &message); err != nil || message.Greeting != nil {
			continue
		}
		if message.Event == "" {
			q.answers <- message
		}
	}
}

// Execute runs a command; result may be nil.
func (q *QMP) Execute(command string, args, result any, timeout time.Duration) error {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	request := map[string]any{"execute": command}
	if args != nil {
		request["arguments"] = args
	}
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if _, err := q.conn.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	select {
	case answer, ok := <-q.answers:
		switch {
		case !ok:
			return fmt.Errorf("QMP %s: QEMU closed the connection", command)
		case answer.Error != nil:
			return fmt.Errorf("QMP %s: %s: %s", command, answer.Error.Class, answer.Error.Description)
		case result != nil:
			return json.Unmarshal(answer.Return, result)
		}
		return nil
	case <-time.After(timeout):
		return fmt.Errorf("QMP %s: no answer within %v", command, timeout)
	}
}

// Close closes the connection.
func (q *QMP) Close() error { return q.conn.Close() }
