package control

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// collector reads the daemon's snapshots at every scrape. Labels come from the configuration and
// from constants in the code, never from a guest.
type collector struct {
	backend Backend
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("vhostd_"+name, help, labels, nil)
}

var (
	healthyDesc   = describe("healthy", "1 while all workers run and all networks are up.")
	workerUpDesc  = describe("worker_up", "1 while the worker thread runs.", "worker")
	sleepsDesc    = describe("worker_sleeps_total", "Times the worker had nothing to do and slept.", "worker")
	faultsDesc    = describe("worker_faults_total", "Accesses to guest memory that had vanished.", "worker")
	arenaDesc     = describe("arena_pages", "Pages of 4 KiB that hold frames or wait in pools to hold some.")
	networkUpDesc = describe("network_up", "1 while the guest's network carries traffic.", "guest")
	connectedDesc = describe("guest_connected", "1 while a front-end is connected.", "guest")
	stationsDesc  = describe("switch_stations", "Addresses that the switch has learnt and not forgotten.", "switch")
	uplinkUpDesc  = describe("switch_uplink_up", "1 while the switch's uplink carries traffic.", "switch")
	startedDesc   = describe("ring_started", "1 while the ring is started.", "guest", "pair", "queue")
	enabledDesc   = describe("ring_enabled", "1 while the ring is enabled.", "guest", "pair", "queue")
	brokenDesc    = describe("ring_broken", "1 while the ring is out of service because its content is impossible.", "guest", "pair", "queue")

	packetsDesc = describe("packets_total", "Frames that reached the network (transmitq) or the guest (receiveq), and commands (controlq).", "guest", "pair", "queue")
	bytesDesc   = describe("bytes_total", "Bytes of those frames, without virtio-net headers.", "guest", "pair", "queue")
	kicksDesc   = describe("kicks_total", "Notifications by the driver.", "guest", "pair", "queue")
	callsDesc   = describe("calls_total", "Notifications to the driver.", "guest", "pair", "queue")
	batchesDesc = describe("batches_total", "Batches of descriptor chains worked off.", "guest", "pair", "queue")
	dropsDesc   = describe("drops_total", "Packets that disappeared, by reason.", "guest", "pair", "queue", "reason")
	copiedDesc  = describe("copied_bytes_total", "Bytes of frames copied out of the guest's memory, by ordinary stores (cached) or past the cache (past_cache).", "guest", "how")
	fencesDesc  = describe("copy_fences_total", "Fences that copies past the cache needed.", "guest")
	poolDesc    = describe("pool_total", "What the guest's page pools did, with the names of the kernel's page_pool.", "guest", "event")
	flightDesc  = describe("pool_in_flight", "Pages of the guest's page pools, with frames or at rest.", "guest")
	allocDesc   = describe("tx_allocator", "1 for the allocator of transmit buffers in use.", "guest", "allocator")
	uplinkDesc  = describe("switch_uplink_drops_total", "Packets that disappeared at the switch's uplink, by reason.", "switch", "reason")
)

// registry returns the metrics of one daemon together with those of the Go runtime and the process.
func registry(b Backend, version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "vhostd_build_info", Help: "1, with the version as a label.",
		ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	r.MustRegister(info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collector{b})
	return r
}

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		healthyDesc, workerUpDesc, sleepsDesc, faultsDesc, arenaDesc, networkUpDesc, connectedDesc, startedDesc, enabledDesc, brokenDesc,
		packetsDesc, bytesDesc, kicksDesc, callsDesc, batchesDesc, dropsDesc, stationsDesc, uplinkUpDesc, uplinkDesc,
		copiedDesc, fencesDesc, poolDesc, flightDesc, allocDesc,
	} {
		ch <- d
	}
	for _, d := range userDescs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, on bool, labels ...string) {
		value := 0.0
		if on {
			value = 1
		}
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	status := c.backend.Status()
	gauge(healthyDesc, status.Healthy)
	for _, w := range status.Workers {
		gauge(workerUpDesc, w.Error == "", w.Name)
		ch <- prometheus.MustNewConstMetric(sleepsDesc, prometheus.CounterValue, float64(w.Sleeps), w.Name)
		ch <- prometheus.MustNewConstMetric(faultsDesc, prometheus.CounterValue, float64(w.Faults), w.Name)
	}
	ch <- prometheus.MustNewConstMetric(arenaDesc, prometheus.GaugeValue, float64(status.ArenaPages))
	for _, g := range status.Guests {
		gauge(networkUpDesc, g.NetworkUp, g.Name)
		gauge(connectedDesc, g.Connected, g.Name)
		for _, r := range g.Rings {
			pair, queue := RingLabels(r.Index, r.Control)
			gauge(startedDesc, r.Started, g.Name, pair, queue)
			gauge(enabledDesc, r.Enabled, g.Name, pair, queue)
			gauge(brokenDesc, r.Broken != "", g.Name, pair, queue)
		}
	}
	for _, s := range status.Switches {
		ch <- prometheus.MustNewConstMetric(stationsDesc, prometheus.GaugeValue, float64(s.Stations), s.Name)
		if s.Uplink == "" {
			continue
		}
		gauge(uplinkUpDesc, s.UplinkUp, s.Name)
		for reason, n := range s.Drops {
			ch <- prometheus.MustNewConstMetric(uplinkDesc, prometheus.CounterValue, float64(n), s.Name, reason)
		}
	}
	c.counters(ch)
	c.userNetworks(ch)
}

func (c collector) counters(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for _, g := range c.backend.Stats().Guests {
		count(copiedDesc, g.Copy.Cached, g.Name, "cached")
		count(copiedDesc, g.Copy.PastCache, g.Name, "past_cache")
		count(fencesDesc, g.Copy.Fences, g.Name)
		for event, n := range map[string]uint64{
			"fast": g.Pool.Fast, "slow": g.Pool.Slow, "empty": g.Pool.Empty, "refill": g.Pool.Refill, "borrowed": g.Pool.Borrowed,
			"cached": g.Pool.Cached, "cache_full": g.Pool.CacheFull, "ring": g.Pool.Ring, "ring_full": g.Pool.RingFull,
			"released_shared": g.Pool.ReleasedShared, "trimmed": g.Pool.Trimmed,
		} {
			count(poolDesc, n, g.Name, event)
		}
		ch <- prometheus.MustNewConstMetric(flightDesc, prometheus.GaugeValue, float64(g.Pool.InFlight), g.Name)
		ch <- prometheus.MustNewConstMetric(allocDesc, prometheus.GaugeValue, 1, g.Name, g.TxAlloc)
		for _, r := range g.Rings {
			pair, queue := RingLabels(r.Index, r.Control)
			count(packetsDesc, r.Packets, g.Name, pair, queue)
			count(bytesDesc, r.Bytes, g.Name, pair, queue)
			count(kicksDesc, r.Kicks, g.Name, pair, queue)
			count(callsDesc, r.Calls, g.Name, pair, queue)
			count(batchesDesc, r.Batches, g.Name, pair, queue)
			for reason, n := range r.Drops {
				count(dropsDesc, n, g.Name, pair, queue, reason)
			}
		}
	}
}

// RingLabels names a ring by queue pair and by the driver's view of its direction. The control
// queue belongs to no pair.
func RingLabels(index int, controlq bool) (pair, queue string) {
	if controlq {
		return "", "controlq"
	}
	queue = "receiveq"
	if index%2 == 1 {
		queue = "transmitq"
	}
	return strconv.Itoa(index / 2), queue
}
