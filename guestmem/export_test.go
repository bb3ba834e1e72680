package guestmem

// MaxMappings is how many mappings all tables together may have.
const MaxMappings = maxMappings

// Reserved returns how many bytes and mappings all tables have.
func Reserved() (bytes, regions int64) { return mapped.Load(), mappings.Load() }
