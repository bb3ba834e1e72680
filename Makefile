# The targets for people: demo, test. The rest is what test consists of, and what developers run alone.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

# One way to build in all steps, that of the packages: what one step has compiled, the next one finds in Go's cache.
# check vets everything, so that no test needs to.
export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS)) -trimpath
export CGO_ENABLED := 0
gotest := go test -vet=off -json

unit   := $(shell go list ./... 2>/dev/null | grep -v /integration)
# What touches shared memory byte by byte runs under arm64 too: emulation catches misalignment, not memory ordering.
arm    := ./virtio/... ./virtqueue/... ./pagemem/... ./fragalloc/... ./pool/...
# The integration tests without guests, which wait as much as they compute: two packages at a time.
light  := $(shell go list ./integration/... 2>/dev/null | grep -v '/integration$$')
report := go run ./scripts/testreport

.PHONY: build demo dist test test-long check unit race arm64 fuzz-smoke integration bench setup clean

build: ## vhostd, in bin/
	go build -o bin/vhostd ./cmd/vhostd

demo: setup build ## a Linux guest boots behind the user network, fetches a page, is reached from outside; under three minutes
	@echo "building the demo"; VHOSTD_BINARY=bin/vhostd go run ./integration/demo

dist: ## Debian packages and archives for amd64 and arm64, in build/dist/; VERSION= instead of what git says, MAINTAINER= of the packages
	@scripts/dist.sh

test: ## everything that CI runs; under 25 minutes on two cores
	@start=$$SECONDS; \
	step() { echo "== $$1 ($$((SECONDS - start)) s)"; $(MAKE) --no-print-directory $$1; }; \
	step setup & setup=$$!; trap wait EXIT; \
	step check; \
	wait $$setup; \
	for name in race arm64 fuzz-smoke integration; do step $$name; done; \
	echo "== done in $$((SECONDS - start)) s"

test-long: setup ## all combinations, many rounds, the race detector in vhostd, long forms of unit tests, a soak; about 95 minutes
	VHOSTD_LONG=1 VHOSTD_RACE=1 $(gotest) -timeout 4h -p 1 -count 1 ./integration/... | $(report) -v
	VHOSTD_LONG=1 $(gotest) -timeout 1h -p 1 -count 1 ./pool ./port/user | $(report) -v
	VHOSTD_LONG=1 $(gotest) -timeout 1h -count 1 -run "^TestLong" ./cmd/vhostd | $(report) -v
	VHOSTD_SOAK=$${VHOSTD_SOAK:-2m} $(gotest) -timeout 4h -count 1 -run "^TestSoak$$" ./integration | $(report) -v
	CGO_ENABLED=1 $(gotest) -race -timeout 1h -count 1 -run "^TestSequence$$" ./integration/cases | $(report) -v

check: ## format, vet, staticcheck, import table, unsafe rules, arm64 build
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	go test -vet=off -count 1 ./internal/layercheck
	GOARCH=arm64 go build ./...
	GOARCH=arm64 go vet ./...

unit: ## unit tests, quick
	$(gotest) $(unit) | $(report)

race: ## unit tests with the race detector
	CGO_ENABLED=1 $(gotest) -race -timeout 15m $(unit) | $(report)
	$(gotest) -run AllocatesNothing ./virtionet ./port/user | $(report)

arm64: ## rings, allocators, copies and codecs on an emulated arm64
	GOARCH=arm64 $(gotest) -short -timeout 10m -exec qemu-aarch64-static $(arm) | $(report)

fuzz-smoke: ## each fuzz target for ten seconds
	@scripts/fuzz.sh 10

integration: setup ## QEMU guests and DPDK against vhostd
	{ $(gotest) -timeout 30m -count 1 ./integration || [ $$? = 1 ]; \
		$(gotest) -timeout 30m -p 2 -count 1 $(light) || [ $$? = 1 ]; } | $(report) -v -repeat 2 # which judges failed tests

bench: setup build ## packets per second against DPDK's own back-end; see docs/performance.md
	@scripts/bench.sh

setup: ## Debian packages that are missing, and the guest kernel
	@scripts/setup.sh

clean:
	rm -rf bin build
