package nettest

import (
	"errors"
	"os"
	"strings"
	"testing"
)

func TestOptionErrors(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"--n: 0: accepted are":                               func(o *Options) { o.N = 0 },
		`--frame: "59": accepted are 60 to 65535`:            func(o *Options) { o.Frame = "59" },
		`--frame: "big"`:                                     func(o *Options) { o.Frame = "big" },
		`--ring: "round": accepted are split, packed`:        func(o *Options) { o.Ring = "round" },
		"--ring-size: 100: a split ring has a power of two":  func(o *Options) { o.RingSize = 100 },
		"--depth: 300: accepted are 1 to 256":                func(o *Options) { o.Depth = 300 },
		`--batch: "2": accepted are random and 1 to --depth`: func(o *Options) { o.Batch = "2" },
		`--layout: "odd": accepted are direct`:               func(o *Options) { o.Layout = "odd" },
		"--layout: indirect needs the feature":               func(o *Options) { o.Layout, o.Indirect = "indirect", false },
		`--wire: "air": accepted are pair, sock`:             func(o *Options) { o.Wire = "air" },
		`--wake: "late"`:                                     func(o *Options) { o.Wake = "late" },
		`--guest-wake: "late"`:                               func(o *Options) { o.Guest = "late" },
		"--reset: -1":                                        func(o *Options) { o.Reset = -1 },
		"--socket: a back-end that runs already":             func(o *Options) { o.Socket, o.InProcess = "/x", true },
		`--tx-alloc: "none"`:                                 func(o *Options) { o.TxAlloc = "none" },
		"--copy: copy policy \"some\": accepted are never":   func(o *Options) { o.Copy = "some" },
		"--cpus: \"1,1\": CPU 1 is listed twice":             func(o *Options) { o.CPUs = []int{0, 1, 1} },
	} {
		o := Defaults()
		change(&o)
		err := o.Validate()
		if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, ErrUsage) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, change := range []func(*Options){
		func(o *Options) {}, func(o *Options) { o.Frame = "imix" }, func(o *Options) { o.Depth, o.Batch = 64, "random" },
		func(o *Options) { o.Ring, o.RingSize = "packed", 100 }, func(o *Options) { o.Frame, o.Mrg = "65535", true },
	} {
		o := Defaults()
		change(&o)
		if err := o.Validate(); err != nil {
			t.Errorf("%v: %v", o, err)
		}
	}
	if o := Defaults(); os.Geteuid() != 0 {
		o.Wire = Tap
		if err := o.Validate(); err == nil {
			t.Error("a tap without root is accepted")
		}
	}
}

func TestVariants(t *testing.T) {
	o := Defaults()
	names, v, err := Variants(o, "ring=split,packed")
	if err != nil || names != [2]string{"ring=split", "ring=packed"} || v[0].Ring != "split" || v[1].Ring != "packed" || v[1].N != o.N {
		t.Error(names, v, err)
	}
	_, v, err = Variants(o, "ring=split+depth=64,ring=packed+depth=32+event-idx=false")
	if err != nil || v[0].Depth != 64 || v[1].Depth != 32 || !v[0].EventIdx || v[1].EventIdx {
		t.Error(v, err)
	}
	for text, want := range map[string]string{
		"": "accepted are two variants", "ring=split": "accepted are two variants", "ring=split,packed,x": "accepted are two variants",
		"ring=split,ring=split": "the same", "split,packed": "KEY=VALUE", "rong=split,packed": "accepted keys are batch, copy",
		"depth=1,x": "whole numbers", "mrg=1,maybe": "true and false", "ring=split,round": "--vs: ring=round: --ring",
	} {
		if _, _, err := Variants(o, text); err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, ErrUsage) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// FuzzVariants: whatever is said of variants is judged in one line.
func FuzzVariants(f *testing.F) {
	for _, text := range []string{"ring=split,packed", "depth=1+n=5,depth=2", "=,=", "a,b", "+,+", "mrg=true,false"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		_, v, err := Variants(Defaults(), text)
		if err == nil {
			for _, o := range v {
				if err := o.Validate(); err != nil {
					t.Errorf("%q: accepted, but %v", text, err)
				}
			}
		} else if !errors.Is(err, ErrUsage) {
			t.Errorf("%q: %v is no error of usage", text, err)
		}
	})
}

func TestDescribe(t *testing.T) {
	o := Defaults()
	if got := o.String(); got != "wire=sock ring=split depth=1 frame=256 wake=block n=1048576" {
		t.Error(got)
	}
	o.Mrg, o.RingSize, o.Socket = true, 512, "/run/x"
	if got := o.String(); got != "socket=/run/x ring=split depth=1 frame=256 wake=block n=1048576 ring-size=512 mrg=true" {
		t.Error(got)
	}
	for v, want := range map[float64]string{0: "0", 1234567: "1,234,567", 12: "12", 0.5: "0.50000", 1234.5678: "1,234.6", -1234567: "-1,234,567", 1e-9: "0.000000"} {
		if got := grouped(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}
