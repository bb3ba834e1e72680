package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// MaxFile bounds the configuration file in bytes; a thousand guests need about a third of it.
const MaxFile = 1 << 20

// File is a configuration file.
type File struct {
	Process `yaml:",inline"`
	Guests  []Guest `yaml:"guests"`
}

// UnmarshalYAML fills in the defaults of what the guest's mapping leaves out.
func (g *Guest) UnmarshalYAML(decode func(any) error) error {
	type plain Guest
	*g = DefaultGuest()
	return decode((*plain)(g))
}

// Error is a mistake in a configuration file.
type Error struct {
	File         string
	Line, Column int // counted from 1; 0 when the mistake has no place
	Err          error
}

// Error begins with FILE:LINE:COLUMN, as compilers do, and is one line whatever the file's values
// hold.
func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.File, printable(e.Err.Error()))
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, printable(e.Err.Error()))
}

// printable escapes what would break the line or steer a terminal.
func printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// Unwrap returns the mistake without its place.
func (e *Error) Unwrap() error { return e.Err }

// ReadFile reads and judges a configuration file. Mistakes are *Error.
func ReadFile(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, &Error{File: path, Err: errors.Unwrap(err)}
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	if err != nil {
		return nil, &Error{File: path, Err: errors.Unwrap(err)}
	}
	return ParseFile(path, text)
}

// ParseFile judges the text of a configuration file: syntax, unknown and repeated keys, every
// value, and that guests do not share a name or a socket. name appears in errors. Mistakes are
// *Error.
func ParseFile(name string, text []byte) (*File, error) {
	if len(text) > MaxFile {
		return nil, &Error{File: name, Err: fmt.Errorf("the file is longer than %d bytes", MaxFile)}
	}
	root, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, located(name, err)
	}
	file := &File{Process: DefaultProcess()}
	if len(root.Docs) > 1 {
		return nil, &Error{File: name, Err: errors.New("the file holds more than one YAML document")}
	}
	if len(root.Docs) == 1 && root.Docs[0].Body != nil {
		ast.Walk(keepText{}, root.Docs[0].Body)
		if err := decode(root.Docs[0].Body, file); err != nil {
			return nil, located(name, err)
		}
	}
	if path, err := file.judge(); err != nil {
		line, column := position(root, path, err)
		return nil, &Error{File: name, Line: line, Column: column, Err: err}
	}
	return file, nil
}

// decode fills file from the document body. The YAML library dereferences nil where a list is
// wanted and a tag stands before something else (goccy/go-yaml v1.19.2, TagNode.ArrayRange); a
// panic of the library becomes an error of the file.
func decode(body ast.Node, file *File) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = errors.New("the file cannot be decoded: write its tags (!name), anchors and aliases out as plain values")
		}
	}()
	return yaml.NodeToValue(body, file, yaml.Strict())
}

// judge returns the first bad value and the YAML path of the mapping that holds it.
func (f *File) judge() (path string, err error) {
	if _, err := f.Process.Parse(); err != nil {
		return "$", err
	}
	names, sockets := map[string]bool{}, map[string]string{f.Control: "the control socket"}
	delete(sockets, "")
	specs := make([]GuestSpec, len(f.Guests))
	for i, g := range f.Guests {
		path := fmt.Sprintf("$.guests[%d]", i)
		if specs[i], err = g.Parse(); err != nil {
			return path, err
		}
		for _, other := range specs[:i] {
			if err := specs[i].Network.Agree(other.Network); err != nil {
				return path, &KeyError{Key: "network", Err: err}
			}
		}
		if names[g.Name] {
			return path, keyErrorf("name", "%q is the name of another guest", g.Name)
		}
		if owner, taken := sockets[g.Socket]; taken {
			return path, keyErrorf("socket", "%s already belongs to %s", g.Socket, owner)
		}
		names[g.Name], sockets[g.Socket] = true, "guest "+g.Name
	}
	return "", nil
}

// position finds the value that err is about, or the mapping at path when the key is not written.
func position(root *ast.File, path string, err error) (line, column int) {
	var key *KeyError
	paths := []string{path}
	if errors.As(err, &key) {
		paths = []string{path + "." + key.Key, path}
	}
	for _, p := range paths {
		compiled, err := yaml.PathString(p)
		if err != nil {
			continue
		}
		if node, err := compiled.FilterFile(root); err == nil && node != nil {
			return placeOf(node)
		}
	}
	return 1, 1
}

// placeOf returns where a node starts; a mapping starts at its first key, its own token is a colon.
func placeOf(node ast.Node) (line, column int) {
	switch n := node.(type) {
	case *ast.MappingNode:
		if len(n.Values) > 0 {
			return placeOf(n.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return placeOf(n.Key)
	}
	if token := node.GetToken(); token != nil && token.Position != nil {
		return token.Position.Line, token.Position.Column
	}
	return 1, 1
}

// located turns the YAML library's error, which carries a source excerpt of many lines, into one line.
func located(name string, err error) error {
	var at yaml.Error
	if !errors.As(err, &at) {
		return &Error{File: name, Err: errors.New(firstLine(err.Error()))}
	}
	e := &Error{File: name, Err: errors.New(firstLine(at.GetMessage()))}
	var typed *yaml.TypeError
	if errors.As(err, &typed) && typed.DstType != nil {
		e.Err = fmt.Errorf("wanted %s here", kindName(typed.DstType))
	}
	if token := at.GetToken(); token != nil && token.Position != nil {
		e.Line, e.Column = token.Position.Line, token.Position.Column
	}
	return e
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "a list"
	}
	return "a mapping of keys to values"
}
