package vswitch

import (
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const testAgeing = 100 * time.Second

func newTestTable() *table {
	t := newTable(testAgeing)
	for i := uint16(firstIndex); i < firstIndex+8; i++ {
		t.admit(i, guestStations)
	}
	return t
}

// checkCounts compares the ports' counters with the entries.
func checkCounts(t testing.TB, tab *table) {
	t.Helper()
	counts := map[uint16]int32{}
	tab.each(func(_ *entry, word uint64) { counts[uint16(word)]++ })
	for i := range tab.owners {
		if got := tab.owners[i].stations.Load(); got != counts[uint16(i)] {
			t.Fatalf("port %d: %d stations counted, %d there", i, got, counts[uint16(i)])
		}
	}
}

// TestTableModel compares the table, far from full, with a map.
func TestTableModel(t *testing.T) {
	type station struct {
		index uint16
		seen  int64
	}
	rapid.Check(t, func(rt *rapid.T) {
		tab, model := newTestTable(), map[uint64]station{}
		now := int64(1)
		macs := rapid.Uint64Range(1, 20)
		known := func(mac uint64) bool { s, ok := model[mac]; return ok && now-s.seen < testAgeing.Milliseconds() }
		rt.Repeat(map[string]func(*rapid.T){
			"learn": func(rt *rapid.T) {
				mac, index := macs.Draw(rt, "mac"), rapid.Uint16Range(firstIndex, firstIndex+3).Draw(rt, "port")
				tab.learn(mac, index, now)
				old := model[mac]
				if s := (station{index, now}); old.index != index || now-old.seen >= testAgeing.Milliseconds()/refreshes {
					model[mac] = s
				}
			},
			"retire": func(rt *rapid.T) {
				index := rapid.Uint16Range(firstIndex, firstIndex+3).Draw(rt, "port")
				tab.retire(index)
				tab.admit(index, guestStations)
				for mac, s := range model {
					if s.index == index {
						model[mac] = station{left, s.seen}
					}
				}
			},
			"sweep": func(*rapid.T) { tab.sweep(now) },
			"wait":  func(rt *rapid.T) { now += rapid.Int64Range(0, 60_000).Draw(rt, "ms") },
			"": func(rt *rapid.T) {
				want := 0
				for mac := uint64(1); mac <= 20; mac++ {
					index := uint16(nobody)
					if known(mac) {
						index = model[mac].index
						want++
					}
					if got := tab.find(mac, now); got != index {
						rt.Fatalf("station %d is behind %d, want %d", mac, got, index)
					}
				}
				if got := tab.count(now); got != want {
					rt.Fatalf("%d stations, want %d", got, want)
				}
			},
		})
		checkCounts(t, tab)
	})
}

// TestTableFlood: a guest that makes up addresses gets its share and no more, and others find room beside many such guests.
func TestTableFlood(t *testing.T) {
	tab := newTestTable()
	now := int64(1)
	for mac := uint64(1); mac <= 100_000; mac++ {
		tab.learn(mac, firstIndex, now)
	}
	if n := tab.owners[firstIndex].stations.Load(); n > guestStations {
		t.Errorf("a guest has %d stations, may have %d", n, guestStations)
	}
	for index := uint16(firstIndex + 1); index < firstIndex+200; index++ { // enough to fill the table
		tab.admit(index, guestStations)
		for mac := range uint64(1000) {
			tab.learn(uint64(index)<<32|mac+1, index, now)
		}
	}
	const honest = 1000
	tab.admit(honest, guestStations)
	for mac := uint64(1); mac <= 3; mac++ {
		tab.learn(0xabcd<<32|mac, honest, now)
		if tab.find(0xabcd<<32|mac, now) != honest {
			t.Errorf("station %d of an honest guest is not known", mac)
		}
	}
	checkCounts(t, tab)
	now += testAgeing.Milliseconds()
	tab.learn(1<<40-1, firstIndex, now) // over its share until the old ones are swept
	if tab.find(1<<40-1, now) != firstIndex {
		t.Error("stations that aged out keep a new one away")
	}
	checkCounts(t, tab)
}

// TestTableConcurrent: counters stay right whatever several workers and the control side do at once.
func TestTableConcurrent(t *testing.T) {
	tab := newTestTable()
	var workers sync.WaitGroup
	for w := range uint16(4) {
		workers.Go(func() {
			for i := range uint64(20_000) {
				mac := i*2654435761%400 + 1
				tab.learn(mac, firstIndex+w, int64(i*20))
				if index := tab.find(mac, int64(i*20)); index >= firstIndex+8 {
					t.Errorf("found behind port %d", index)
				}
			}
		})
	}
	workers.Go(func() {
		for range 50 {
			tab.admit(firstIndex+7, guestStations)
			for mac := range uint64(50) {
				tab.learn(mac+1, firstIndex+7, 1)
			}
			tab.retire(firstIndex + 7)
		}
	})
	workers.Wait()
	checkCounts(t, tab)
}
