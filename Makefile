# The targets for people: demo, test. The rest is what test consists of, and what developers run alone.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

unit   := $(shell go list ./... 2>/dev/null | grep -v /integration)
# What touches shared memory byte by byte runs under arm64 too: emulation catches misalignment, not memory ordering.
arm    := ./virtio/... ./virtqueue/... ./pagemem/... ./fragalloc/... ./pool/...
report := go run ./scripts/testreport

.PHONY: build demo dist test test-long check unit race arm64 fuzz-smoke integration bench setup clean

build: ## vhostd, in bin/
	CGO_ENABLED=0 go build -trimpath -o bin/vhostd ./cmd/vhostd

demo: setup build ## a Linux guest boots behind the user network, fetches a page, is reached from outside; under three minutes
	@echo "building the demo"; CGO_ENABLED=0 VHOSTD_BINARY=bin/vhostd go run -trimpath ./integration/demo

dist: ## Debian packages and archives for amd64 and arm64, in build/dist/; VERSION= instead of what git says
	@scripts/dist.sh

test: ## everything that CI runs; under 25 minutes on two cores
	@start=$$SECONDS; \
	for step in setup check race arm64 fuzz-smoke integration; do \
		echo "== $$step ($$((SECONDS - start)) s)"; \
		$(MAKE) --no-print-directory $$step; \
	done; \
	echo "== done in $$((SECONDS - start)) s"

test-long: setup ## all combinations, many rounds, the race detector in vhostd, long forms of unit tests, a soak; about 95 minutes
	VHOSTD_LONG=1 VHOSTD_RACE=1 go test -json -timeout 4h -p 1 -count 1 ./integration/... | $(report) -v
	VHOSTD_LONG=1 go test -json -timeout 1h -p 1 -count 1 ./pool ./port/user | $(report) -v
	VHOSTD_LONG=1 go test -json -timeout 1h -count 1 -run "^TestLong" ./cmd/vhostd | $(report) -v
	VHOSTD_SOAK=$${VHOSTD_SOAK:-2m} go test -json -timeout 4h -count 1 -run "^TestSoak$$" ./integration | $(report) -v
	go test -race -json -timeout 1h -count 1 -run "^TestSequence$$" ./integration/cases | $(report) -v

check: ## format, vet, staticcheck, import table, unsafe rules, arm64 build
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	go test -count 1 ./internal/layercheck
	GOARCH=arm64 CGO_ENABLED=0 go build ./...
	GOARCH=arm64 go vet ./...

unit: ## unit tests, quick
	go test -json $(unit) | $(report)

race: ## unit tests with the race detector
	go test -race -json -timeout 15m $(unit) | $(report)
	go test -json -run AllocatesNothing ./virtionet ./port/user | $(report)

arm64: ## rings, allocators, copies and codecs on an emulated arm64
	GOARCH=arm64 CGO_ENABLED=0 go test -short -json -timeout 10m -exec qemu-aarch64-static $(arm) | $(report)

fuzz-smoke: ## each fuzz target for ten seconds
	@scripts/fuzz.sh 10

integration: setup ## QEMU guests and DPDK against vhostd
	go test -json -timeout 30m -p 1 -count 1 ./integration/... | $(report) -v -repeat 2

bench: setup build ## packets per second against DPDK's own back-end; see docs/performance.md
	@scripts/bench.sh

setup: ## Debian packages that are missing, and the guest kernel
	@scripts/setup.sh

clean:
	rm -rf bin build
