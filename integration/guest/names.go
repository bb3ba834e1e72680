package guest

import (
	"fmt"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// ResolveArgs describes a question to a resolver, over UDP first and over TCP if the answer was too long.
type ResolveArgs struct {
	Server  string        `json:"server"` // IP:PORT
	Name    string        `json:"name"`
	Type    string        `json:"type"` // such as A
	Timeout time.Duration `json:"timeout"`
}

// ResolveResult is the answer. Answers are the records' data as a zone file has it, without name, type and time to live.
type ResolveResult struct {
	Code    string   `json:"code"` // such as NOERROR
	Answers []string `json:"answers"`
	TCP     bool     `json:"tcp"` // the answer was too long for UDP
}

// Resolve asks.
func Resolve(args ResolveArgs) (result ResolveResult, err error) {
	kind, ok := dns.StringToType[args.Type]
	if !ok {
		return result, fmt.Errorf("resolve: no type %q", args.Type)
	}
	question := new(dns.Msg).SetQuestion(dns.Fqdn(args.Name), kind)
	client := dns.Client{Timeout: args.Timeout}
	answer, _, err := client.Exchange(question, args.Server)
	if err != nil {
		return result, err
	}
	if result.TCP = answer.Truncated; result.TCP {
		client.Net = "tcp"
		if answer, _, err = client.Exchange(question, args.Server); err != nil {
			return result, fmt.Errorf("over TCP: %w", err)
		}
	}
	result.Code = dns.RcodeToString[answer.Rcode]
	for _, record := range answer.Answer {
		result.Answers = append(result.Answers, strings.TrimPrefix(record.String(), record.Header().String()))
	}
	return result, nil
}
