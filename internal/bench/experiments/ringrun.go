package experiments

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/vhostd/vhostd/internal/bench"
)

// ringRunner sends cycles of chains round a ring.
type ringRunner struct {
	batch, cycles, cpu int
	mode               ringMode
	rings              map[string]*ringPair
}

func (r *ringRunner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	pair := r.rings[variant]
	if r.mode == oneThread {
		cost, err := bench.Timed(15, r.cycles, func() error { return r.turns(pair) })
		return bench.Sample{Cost: cost}, err
	}
	w, err := newRingWaits(r.mode == twoSleep)
	if err != nil {
		return bench.Sample{}, err
	}
	var quit atomic.Bool
	ended := make(chan error, 1)
	started := make(chan error)
	go r.device(pair, w, &quit, started, ended)
	if err := <-started; err != nil {
		return bench.Sample{}, errors.Join(err, w.close())
	}
	cost, err := bench.Timed(15, r.cycles, func() error { return r.drive(ctx, pair, w) })
	quit.Store(true)
	w.kick.signal()
	err = errors.Join(err, <-ended, w.close())
	return bench.Sample{Cost: cost}, err
}

// device is the other thread.
func (r *ringRunner) device(pair *ringPair, w *ringWaits, quit *atomic.Bool, started, ended chan<- error) {
	unlock, err := bench.LockThread(r.cpu)
	started <- err
	if err != nil {
		return
	}
	defer unlock()
	for err == nil && !quit.Load() {
		var n int
		if n, err = pair.serve(ringSize); err == nil {
			err = w.served(pair.device, n)
		}
	}
	ended <- err
}

// turns is driver and device one after the other.
func (r *ringRunner) turns(pair *ringPair) error {
	for done := 0; done < r.cycles; {
		n := min(r.batch, r.cycles-done)
		added, err := pair.add(n)
		if err != nil {
			return err
		}
		if served, err := pair.serve(n); served != added || err != nil {
			return fmt.Errorf("%d chains added, %d served: %w", added, served, err)
		}
		reaped, err := pair.reap()
		if reaped != added || err != nil {
			return fmt.Errorf("%d chains added, %d came back: %w", added, reaped, err)
		}
		done += reaped
	}
	return nil
}

// drive is the driver's side against a device on another thread, with as many batches under way as fit.
func (r *ringRunner) drive(ctx context.Context, pair *ringPair, w *ringWaits) error {
	added, done := 0, 0
	for idle := 0; done < r.cycles; idle++ {
		if added < r.cycles {
			n, err := pair.add(min(r.batch, r.cycles-added))
			if err != nil {
				return err
			}
			added += n
			w.shown(pair.driver, n)
		}
		n, err := pair.reap()
		if err != nil {
			return err
		}
		if n > 0 {
			done, idle = done+n, 0
		}
		if n == 0 && (added == r.cycles || pair.driver.Free() < r.batch) {
			if err := w.reaped(pair.driver); err != nil {
				return err
			}
		}
		if idle&0xfffff == 0xfffff && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (r *ringRunner) Close() error {
	var errs []error
	for _, pair := range r.rings {
		errs = append(errs, pair.close())
	}
	return errors.Join(errs...)
}
