package experiments

import (
	"context"
	"os"
	"testing"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-bench"), testmain.Mappings("memfd:"), testmain.Goroutines()))
}

// small are values with which every comparison takes a moment: of an option, or of one experiment's.
var small = map[string]string{"n": "2K", "wait": "spin,sleep", "cycles": "4K", "area": "32K,1M", "victim-area": "32K", "victim": "64K", "size": "256,1536", "batch": "1,8,64",
	"E2 n": "1M", "E2p n": "1M", "rate": "64M", "E1 n": "16", "E1 ring": "split", "E1s n": "256", "E1s ring": "packed", "daemon": "inside"}

// TestAll runs every comparison of every experiment: what it does must be right, what it costs does not matter here.
func TestAll(t *testing.T) {
	for _, e := range All() {
		t.Run(e.Name, func(t *testing.T) {
			p := bench.Params{Values: map[string]string{}}
			for _, o := range e.Options {
				p.Values[o.Name] = o.Default
				for _, key := range []string{o.Name, e.Name + " " + o.Name} {
					if v, ok := small[key]; ok {
						p.Values[o.Name] = v
					}
				}
			}
			comparisons, err := e.Build(p)
			if err != nil || len(comparisons) == 0 {
				t.Fatal(len(comparisons), err)
			}
			results := 0
			err = bench.Run(context.Background(), e, comparisons, bench.Settings{Pairs: 2, CPU: -1}, func(r bench.Result) {
				results++
				if r.Pairs != 2 || r.Result < 0 || r.Result == 0 && r.NameB != "" || r.Claim == "" || r.Source == "" || (r.Verdict == "") != (r.Target == 0) {
					t.Errorf("%+v", r)
				}
			})
			if err != nil || results != len(comparisons) {
				t.Errorf("%d of %d results: %v", results, len(comparisons), err)
			}
		})
	}
}

// TestDefaults: the values of the options are accepted, and nonsense is not.
func TestDefaults(t *testing.T) {
	for _, e := range All() {
		for _, full := range []bool{false, true} {
			p := bench.Params{Full: full, Values: map[string]string{}}
			for _, o := range e.Options {
				p.Values[o.Name] = o.Default
				if full && o.Full != "" {
					p.Values[o.Name] = o.Full
				}
			}
			if list, err := e.Build(p); err != nil || len(list) == 0 {
				t.Errorf("%s: %v", e.Name, err)
			}
			for _, o := range e.Options {
				was := p.Values[o.Name]
				for _, bad := range []string{"", "x", "-1", "1,,2", "99999999999999999999"} {
					p.Values[o.Name] = bad
					if _, err := e.Build(p); err == nil {
						t.Errorf("%s: --%s=%q is accepted", e.Name, o.Name, bad)
					}
				}
				p.Values[o.Name] = was
			}
		}
	}
}

// TestFindsMistakes: counters and payloads that are not right end an experiment.
func TestFindsMistakes(t *testing.T) {
	r, err := newPoolRunner(1024)
	if err != nil {
		t.Fatal(err)
	}
	before := r.pool.Stats()
	if _, err := r.Run(context.Background(), "ring"); err != nil {
		t.Error(err)
	}
	if err := exact("fast", before, r.pool.Stats(), 1024); err == nil {
		t.Error("a wrong count is not found")
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	a, err := newArea(1<<20, 1536, copyBatch)
	if err != nil {
		t.Fatal(err)
	}
	a.copy(copyKinds["hybrid"], copyBatch)
	if err := a.check(); err != nil {
		t.Error(err)
	}
	a.dst[5*a.stride+100]++
	if a.check() == nil {
		t.Error("a damaged packet is not found")
	}
	if err := a.close(); err != nil {
		t.Error(err)
	}
}

// TestLeakIsFound: a page that is not put back fails the experiment's end.
func TestLeakIsFound(t *testing.T) {
	r, err := newPoolRunner(1024)
	if err != nil {
		t.Fatal(err)
	}
	id, ok := r.pool.Alloc()
	if !ok {
		t.Fatal("no page")
	}
	if err := r.Close(); err == nil {
		t.Fatal("a page is under way and nobody says so")
	}
	r.pool.Put(id, 1, stranger)
	if err := closePool(r.pool, r.arena); err != nil {
		t.Error(err)
	}
}
