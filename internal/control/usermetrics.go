package control

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/port/user"
)

// Metrics of user networks have the label guest or switch, whichever owns the network.
var (
	flowsDesc     = describe("user_flows", "Flows of a user network at present.", "guest", "switch", "proto")
	openedDesc    = describe("user_flows_opened_total", "Flows that began.", "guest", "switch", "proto")
	notOpenedDesc = describe("user_flows_not_opened_total", "Flows that did not begin, by reason.", "guest", "switch", "proto", "reason")
	flowBytesDesc = describe("user_bytes_total", "Payload of flows.", "guest", "switch", "proto", "direction")
	flowPktsDesc  = describe("user_packets_total", "Datagrams, and segments of TCP, of flows.", "guest", "switch", "proto", "direction")
	leasesDesc    = describe("user_leases", "Leases of DHCP, by state.", "guest", "switch", "state")
	dnsDesc       = describe("user_dns_queries_total", "Questions of guests, by what became of them.", "guest", "switch", "result")
	refusedDesc   = describe("user_policy_refusals_total", "Flows and look-ups that the policy refused, by reason.", "guest", "switch", "reason")
	endedDesc     = describe("user_policy_ended_total", "Flows that a later egress policy ended, by reason.", "guest", "switch", "reason")
)

var userDescs = []*prometheus.Desc{
	flowsDesc, openedDesc, notOpenedDesc, flowBytesDesc, flowPktsDesc, leasesDesc, dnsDesc, refusedDesc, endedDesc,
}

// userNetworks collects what user networks count.
func (c collector) userNetworks(ch chan<- prometheus.Metric) {
	for _, n := range c.backend.UserNetworks() {
		guest, lan := n.Name, ""
		if n.Owner == daemon.OwnerSwitch {
			guest, lan = "", n.Name
		}
		count := func(d *prometheus.Desc, v uint64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), append([]string{guest, lan}, labels...)...)
		}
		for _, p := range n.Protocols() {
			ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(p.Flows), guest, lan, p.Proto)
			flowCounters(p, count)
		}
		states := map[string]int{}
		for _, l := range n.Leases().Leases {
			states[string(l.State)]++
		}
		for state, v := range states {
			ch <- prometheus.MustNewConstMetric(leasesDesc, prometheus.GaugeValue, float64(v), guest, lan, state)
		}
		if v := n.DNS(); v.Serving {
			for result, v := range map[string]uint64{
				"forwarded": v.Stats.Forwarded, "static": v.Stats.Local, "refused": v.Stats.Refused, "failed": v.Stats.Failed, "busy": v.Stats.Busy,
				"malformed": v.Stats.Malformed,
			} {
				count(dnsDesc, v, result)
			}
		}
		policy := n.Policy()
		for reason, v := range policy.Refusals {
			count(refusedDesc, v, reason)
		}
		for reason, v := range policy.Ended {
			count(endedDesc, v, reason)
		}
	}
}

func flowCounters(p user.Protocol, count func(*prometheus.Desc, uint64, ...string)) {
	count(openedDesc, p.Opened, p.Proto)
	count(notOpenedDesc, p.Refused, p.Proto, "policy")
	count(notOpenedDesc, p.Limited, p.Proto, "limit")
	count(notOpenedDesc, p.Failed, p.Proto, "failed")
	count(flowBytesDesc, p.FromGuest, p.Proto, "from_guest")
	count(flowBytesDesc, p.ToGuest, p.Proto, "to_guest")
	count(flowPktsDesc, p.PacketsFrom, p.Proto, "from_guest")
	count(flowPktsDesc, p.PacketsTo, p.Proto, "to_guest")
}
