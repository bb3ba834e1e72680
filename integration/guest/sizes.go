package guest

import (
	"bytes"
	"net"
	"time"
)

// SizesArgs describes datagrams of given lengths to an echo server, one after the other. A datagram may get lost on the way; each
// has three tries.
type SizesArgs struct {
	Addr    string        `json:"addr"`
	Sizes   []int         `json:"sizes"`
	Timeout time.Duration `json:"timeout"` // for each try
}

// SizesResult are the lengths of the datagrams that came back unharmed, in the order of the arguments.
type SizesResult struct {
	Returned []int `json:"returned"`
	Tries    int   `json:"tries"`
}

// Sizes sends the datagrams over conn (connected). Errors of the socket, such as a refused port, are lost datagrams.
func Sizes(conn net.Conn, args SizesArgs) (result SizesResult, err error) {
	answer := make([]byte, 65536)
	for number, size := range args.Sizes {
		sent := datagram(number, max(size, 8))[:size]
		for range 3 {
			result.Tries++
			if _, err := conn.Write(sent); err != nil {
				time.Sleep(args.Timeout / 10)
				continue
			}
			if err := conn.SetReadDeadline(time.Now().Add(args.Timeout)); err != nil {
				return result, err
			}
			n, err := conn.Read(answer)
			for err == nil && n != size { // a late answer to an earlier one
				n, err = conn.Read(answer)
			}
			if err == nil && bytes.Equal(answer[:n], sent) {
				result.Returned = append(result.Returned, size)
				break
			}
		}
	}
	return result, nil
}
